# Sourced by run scripts for several nodes: runs "$@" on each node, and waits.
NODES=${SLURM_NNODES:-${NODES:-2}}
set_gpus 1 "$NODES" # without Slurm one process per node, unless GPUS is set
# A random port and id, to avoid those of other runs. From 32768 on, the system assigns ports itself.
port=$((10000 + RANDOM % 20000))
# Nodes wait ten minutes for each other; read_timeout is how long they wait for the first one.
launch=("${PYTHON[@]}" -m common.torchrun --nnodes="$NODES" --nproc-per-node="$GPUS"
    --rdzv-backend=c10d --rdzv-id="${SLURM_JOB_ID:-0}-$port" --rdzv-conf=read_timeout=600)
if [[ ${SLURM_JOB_ID:-} && ! ${SLURM_JOB_NODELIST:-} ]]; then
    echo "Error: SLURM_JOB_ID is set, but SLURM_JOB_NODELIST is not: outside of a job, run" \
        "\`unset SLURM_JOB_ID\`" >&2
    return 2
elif [[ ${SLURM_JOB_ID:-} ]]; then # --overlap: also works in `srun --pty bash`
    host=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
    echo "Nodes: $SLURM_JOB_NODELIST, which meet at $host:$port"
    # srun takes only one of these. A job submitted within a job, as in JupyterHub's terminal,
    # may have two: its own and the outer job's. A step gets the job's memory without them.
    unset SLURM_MEM_PER_CPU SLURM_MEM_PER_GPU SLURM_MEM_PER_NODE
    cpus=${SLURM_CPUS_PER_TASK:-$((GPUS * ${SLURM_CPUS_PER_GPU:-1}))} # not srun's default, 1
    exec srun --overlap --nodes="$NODES" --ntasks="$NODES" --ntasks-per-node=1 \
        --cpus-per-task="$cpus" --kill-on-bad-exit=1 \
        "${launch[@]}" --rdzv-endpoint="$host:$port" "$@"
fi
launch+=(--rdzv-endpoint="127.0.0.1:$port" --local-addr=127.0.0.1 "$@")
set -m # own process groups: Ctrl-C reaches only this script, and the trap ends all
trap 'kill $(jobs -p) 2> /dev/null || true' EXIT
for ((node = 0; node < NODES; node++)); do
    (pick_gpus "$((node * GPUS + 1))-$(((node + 1) * GPUS))" && exec "${launch[@]}") &
done
for ((node = 0; node < NODES; node++)); do
    wait -n # if one fails, this script ends, and the trap ends the others
done
