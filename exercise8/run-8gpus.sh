#!/bin/bash
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --cpus-per-task=56
#SBATCH --gpus-per-node=8
#SBATCH --time=02:00:00

# 8 processes on one node, each with a GPU of its own.
#     sbatch run-8gpus.sh SCRIPT.py [OPTIONS]
#     bash run-8gpus.sh SCRIPT.py [OPTIONS]      without Slurm; without GPUs: on 8 CPU cores

set -euo pipefail
cd "$(dirname "$0")"
if [[ ! -e common ]]; then # Slurm runs a copy of this file, and knows where it was
    command=$(squeue --noheader --format=%o --jobs="$SLURM_JOB_ID")
    cd "$(dirname "${command%" $*"}")"
fi
source common/env.sh
[[ -f ${1:-} ]] ||
    { echo "Error: no script '${1:-}' in $PWD: type sbatch run-8gpus.sh SCRIPT.py" >&2; exit 2; }

gpus 8
exec "${PYTHON[@]}" -m common.torchrun --standalone \
    --nproc-per-node="${SLURM_GPUS_ON_NODE:-8}" "$@"
