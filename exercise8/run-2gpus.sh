#!/bin/bash
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --cpus-per-task=14
#SBATCH --gpus-per-node=2
#SBATCH --time=02:00:00

# 2 processes on one node, each with a GPU of its own.
#     sbatch run-2gpus.sh SCRIPT.py [OPTIONS]
#     bash run-2gpus.sh SCRIPT.py [OPTIONS]      without Slurm; without GPUs: on 2 CPU cores

set -euo pipefail
cd "${SLURM_SUBMIT_DIR:-$(dirname "$0")}"
source common/env.sh
[[ -f ${1:-} ]] || { echo "Error: no script '${1:-}': type sbatch run-2gpus.sh SCRIPT.py" >&2; exit 2; }

gpus 2
exec "${PYTHON[@]}" -m common.torchrun --standalone \
    --nproc-per-node="${SLURM_GPUS_ON_NODE:-2}" "$@"
