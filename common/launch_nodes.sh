# Sourced by run scripts for several nodes: runs "$@" on each node, and waits.
NODES=${SLURM_NNODES:-${NODES:-2}}
set_gpus 1 "$NODES" # without Slurm one process per node, unless GPUS is set
host=127.0.0.1 nodes="$NODES nodes on this machine"
if [[ ${SLURM_JOB_ID:-} ]]; then
    host=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1) nodes=$SLURM_JOB_NODELIST
fi
limit=${DDP_TIMEOUT:-540} # seconds to wait for each other
# A port and an id that no other run has. From 32768 on, the system assigns ports itself.
port=$((10000 + RANDOM % 20000))
echo "Nodes: $nodes, which meet at $host:$port"
launch=("${PYTHON[@]}" -m common.torchrun --nnodes="$NODES"
    --nproc-per-node="$GPUS" --rdzv-id="${SLURM_JOB_ID:-0}-$port" --rdzv-backend=c10d
    --rdzv-endpoint="$host:$port"
    --rdzv-conf="join_timeout=$limit,read_timeout=$limit,timeout=$limit" "$@")
if [[ ${SLURM_JOB_ID:-} ]]; then # --overlap: also works in `srun --pty bash`
    exec srun --overlap --nodes="$NODES" --ntasks="$NODES" --ntasks-per-node=1 \
        --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" --kill-on-bad-exit=1 "${launch[@]}"
fi
set -m # own process groups: Ctrl-C reaches only this script, and the trap ends the nodes
trap 'kill $(jobs -p) 2> /dev/null || true' EXIT
for ((node = 0; node < NODES; node++)); do
    (pick_gpus "$((node * GPUS + 1))-$(((node + 1) * GPUS))" && exec "${launch[@]}") &
done
for ((node = 0; node < NODES; node++)); do
    wait -n # if one fails, this script ends, and the trap ends the others
done
