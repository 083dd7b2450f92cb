#!/bin/bash
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --cpus-per-task=7
#SBATCH --gpus-per-node=1
#SBATCH --time=02:00:00

# One process, on one GPU.
#     sbatch run.sh SCRIPT.py [OPTIONS]
#     bash run.sh SCRIPT.py [OPTIONS]      without Slurm; without GPUs: on 1 CPU core

set -euo pipefail
cd "${SLURM_SUBMIT_DIR:-$(dirname "$0")}"
source common/env.sh
[[ -f ${1:-} ]] || { echo "Error: no script '${1:-}': type sbatch run.sh SCRIPT.py" >&2; exit 2; }

exec "${PYTHON[@]}" "$@"
