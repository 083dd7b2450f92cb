# Sourced by run scripts for two nodes: starts what "$@" says on both, and waits for it.
job=${SLURM_JOB_ID:-$$}
host=localhost
[[ ! ${SLURM_JOB_ID:-} ]] || host=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
# The processes meet at the first node, at a port of this job's own.
launch=("${PYTHON[@]}" -m common.torchrun --nnodes=2
    --nproc-per-node="${SLURM_GPUS_ON_NODE:-1}"
    --rdzv-id="$job" --rdzv-backend=c10d --rdzv-endpoint="$host:$((10000 + job % 50000))" "$@")

if [[ ${SLURM_JOB_ID:-} ]]; then
    exec srun --cpus-per-task="$SLURM_CPUS_PER_TASK" --kill-on-bad-exit=1 "${launch[@]}"
fi
gpus 2
"${launch[@]}" & first=$!
CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES-1} "${launch[@]}" & second=$!
trap 'kill $first $second 2>/dev/null || true' EXIT
wait -n # if one fails, this script ends here, and the other with it
wait $first
wait $second
