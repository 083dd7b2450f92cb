# Sourced by run scripts for several nodes, after set_gpus: runs "$@" on each node, and waits.
# A random port and id, so that runs do not meet each other's. Ports from 32768 on are assigned by
# the system.
port=$((10000 + RANDOM % 20000))
# Nodes wait ten minutes for each other; read_timeout is how long they wait for the first one.
launch=("${PYTHON[@]}" -m common.torchrun --nnodes="$NODES" --nproc-per-node="$GPUS"
    --rdzv-backend=c10d --rdzv-id="${SLURM_JOB_ID:-0}-$port" --rdzv-conf=read_timeout=600)
if [[ ${SLURM_JOB_ID:-} ]]; then # --overlap: also works in `srun --pty bash`
    host=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
    echo "Nodes: $SLURM_JOB_NODELIST, which meet at $host:$port"
    # srun accepts only one of these. A job that is submitted within a job, as in JupyterHub's
    # terminal, may have two: its own and the outer job's. Without them, a step gets the job's memory.
    unset SLURM_MEM_PER_CPU SLURM_MEM_PER_GPU SLURM_MEM_PER_NODE
    cpus=${SLURM_CPUS_PER_TASK:-$((GPUS * ${SLURM_CPUS_PER_GPU:-1}))} # not srun's default, 1
    exec srun --overlap --nodes="$NODES" --ntasks="$NODES" --ntasks-per-node=1 \
        --cpus-per-task="$cpus" --kill-on-bad-exit=1 \
        "${launch[@]}" --rdzv-endpoint="$host:$port" "$@"
fi
# Without Slurm this machine stands in for all nodes, and each gets its part of the GPUs.
launch+=(--rdzv-endpoint="127.0.0.1:$port" --local-addr=127.0.0.1 "$@")
gpus=${CUDA_VISIBLE_DEVICES-$(seq -s, 0 63)}
set -m # separate process groups: Ctrl-C reaches only this script, and the trap ends the rest
trap 'kill $(jobs -p) 2> /dev/null || true' EXIT
for ((node = 0; node < NODES; node++)); do
    part=$((node * GPUS + 1))-$(((node + 1) * GPUS))
    [[ ${NCCL_MULTI_RANK_GPU_ENABLE:-0} == 1 ]] || # processes that share GPUs must see all GPUs
        export CUDA_VISIBLE_DEVICES=$(cut --delimiter=, --fields="$part" <<< "$gpus")
    "${launch[@]}" &
done
for ((node = 0; node < NODES; node++)); do
    wait -n # if one fails, this script ends, and the trap ends the others
done
