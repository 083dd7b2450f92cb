# Sourced by run scripts for several nodes: starts what "$@" says on each, and waits for it.
set_gpus 1 2 # without Slurm one for each node, unless you say GPUS=2
host=127.0.0.1 nodes="two nodes on this machine"
if [[ ${SLURM_JOB_ID:-} ]]; then
    host=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1) nodes=$SLURM_JOB_NODELIST
fi
limit=${DDP_TIMEOUT:-540} # seconds to wait for each other
# A port and an id of this run's own. From 32768 on the system hands out ports itself.
port=$((10000 + RANDOM % 20000))
echo "Nodes: $nodes, which meet at $host:$port"
launch=("${PYTHON[@]}" -m common.torchrun --nnodes="${SLURM_NNODES:-2}"
    --nproc-per-node="$GPUS" --rdzv-id="${SLURM_JOB_ID:-0}-$port" --rdzv-backend=c10d
    --rdzv-endpoint="$host:$port"
    --rdzv-conf="join_timeout=$limit,read_timeout=$limit,timeout=$limit" "$@")
if [[ ${SLURM_JOB_ID:-} ]]; then # --overlap: also within `srun --pty bash`, which has it all
    exec srun --overlap --nodes="$SLURM_NNODES" --ntasks="$SLURM_NNODES" --ntasks-per-node=1 \
        --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" --kill-on-bad-exit=1 "${launch[@]}"
fi
trap 'kill $(jobs -p) 2> /dev/null || true' EXIT
(pick_gpus "1-$GPUS" && exec "${launch[@]}") &
(pick_gpus "$((GPUS + 1))-$((2 * GPUS))" && exec "${launch[@]}") &
wait -n # if one fails, this script ends here, and the other with it
wait -n
