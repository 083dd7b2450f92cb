# Sourced by run scripts for several nodes: starts what "$@" says on each, and waits for it.
job=${SLURM_JOB_ID:-$$} host=localhost
if [[ ${SLURM_JOB_ID:-} ]]; then
    JOB_NODES=$(scontrol show hostnames "$SLURM_JOB_NODELIST") host=${JOB_NODES%%$'\n'*}
    export JOB_NODES # if one of them does not come, common.torchrun names it
fi
# The processes meet at the first node, at a port of this job's own. From 32768 on the system
# deals out ports itself.
launch=("${PYTHON[@]}" -m common.torchrun --nnodes="${SLURM_NNODES:-2}"
    --nproc-per-node="${SLURM_GPUS_ON_NODE:-1}" --rdzv-id="$job" --rdzv-backend=c10d
    --rdzv-endpoint="$host:$((10000 + job % 20000))"
    --rdzv-conf=join_timeout=300,read_timeout=300 "$@") # a slow disk may take minutes

if [[ ${SLURM_JOB_ID:-} ]]; then # --overlap: also within `srun --pty bash`, which has it all
    exec srun --overlap --nodes="$SLURM_NNODES" --ntasks="$SLURM_NNODES" --ntasks-per-node=1 \
        --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" --kill-on-bad-exit=1 "${launch[@]}"
fi
gpus 2
(pick_gpus 1 && exec "${launch[@]}") & first=$!
(pick_gpus 2 && exec "${launch[@]}") & second=$!
trap 'kill $first $second 2>/dev/null || true' EXIT
wait -n # if one fails, this script ends here, and the other with it
wait $first
wait $second
