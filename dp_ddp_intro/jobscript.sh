#!/bin/bash
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --cpus-per-task=7
#SBATCH --gpus-per-node=1
#SBATCH --time=00:20:00

# One process, on one GPU.
#     sbatch jobscript.sh single.py [OPTIONS]
#     bash jobscript.sh single.py [OPTIONS]      without Slurm; without GPUs: on 1 CPU core

set -euo pipefail
cd "$(dirname "$0")"
if [[ ! -e common ]]; then # Slurm runs a copy of this file, and knows where it was
    command=$(squeue --noheader --format=%o --jobs="$SLURM_JOB_ID")
    cd "$(dirname "${command%" $*"}")"
fi
source common/env.sh
[[ -f ${1:-} ]] ||
    { echo "Error: no script '${1:-}' in $PWD: type sbatch jobscript.sh SCRIPT.py" >&2; exit 2; }

exec "${PYTHON[@]}" "$@"
