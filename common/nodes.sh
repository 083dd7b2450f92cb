# Sourced by run scripts for several nodes: starts what "$@" says on each, and waits for it.
job=${SLURM_JOB_ID:-$$} host=localhost
if [[ ${SLURM_JOB_ID:-} ]]; then
    JOB_NODES=$(scontrol show hostnames "$SLURM_JOB_NODELIST") host=${JOB_NODES%%$'\n'*}
    export JOB_NODES # if one of them does not come, common.torchrun names it
fi
gpus 1 2 # without Slurm one for each node, unless you say GPUS=2
# The processes meet at the first node, at a port of this job's own. From 32768 on the system
# deals out ports itself.
launch=("${PYTHON[@]}" -m common.torchrun --nnodes="${SLURM_NNODES:-2}"
    --nproc-per-node="$GPUS" --rdzv-id="$job" --rdzv-backend=c10d
    --rdzv-endpoint="$host:$((10000 + job % 20000))" "$@")

if [[ ${SLURM_JOB_ID:-} ]]; then # --overlap: also within `srun --pty bash`, which has it all
    exec srun --overlap --nodes="$SLURM_NNODES" --ntasks="$SLURM_NNODES" --ntasks-per-node=1 \
        --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" --kill-on-bad-exit=1 "${launch[@]}"
fi
trap 'printf "\nStopped by Ctrl-C\n" >&2; exit 130' INT
# By setsid, where there is one, they get no Ctrl-C: else both would say so, too.
apart=$(command -v setsid || true)
(pick_gpus "1-$GPUS" && exec $apart "${launch[@]}") & first=$!
(pick_gpus "$((GPUS + 1))-$((2 * GPUS))" && exec $apart "${launch[@]}") & second=$!
trap 'kill $first $second 2>/dev/null || true' EXIT
wait -n # if one fails, this script ends here, and the other with it
wait $first
wait $second
