#!/bin/bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=14
#SBATCH --gpus-per-node=2
#SBATCH --time=02:00:00

# On each of two nodes as many processes as it has GPUs for this job.
#     sbatch run-2nodes.sh SCRIPT.py [OPTIONS]
#     bash run-2nodes.sh SCRIPT.py [OPTIONS]      without Slurm: two launchers play two nodes

set -euo pipefail
cd "$(dirname "$0")"
if [[ ! -e common ]]; then # Slurm runs a copy of this file, and knows where it was
    command=$(squeue --noheader --format=%o --jobs="$SLURM_JOB_ID")
    cd "$(dirname "${command%" $*"}")"
fi
source common/env.sh
[[ -f ${1:-} ]] ||
    { echo "Error: no script '${1:-}' in $PWD: type sbatch run-2nodes.sh SCRIPT.py" >&2; exit 2; }

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
