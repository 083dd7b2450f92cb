#!/bin/bash
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --cpus-per-task=14
#SBATCH --gpus-per-node=2
#SBATCH --time=00:20:00

# One process for two GPUs of one node.
#     sbatch jobscript_dp.sh dp.py [OPTIONS]
#     bash jobscript_dp.sh dp.py [OPTIONS]      without Slurm; without GPUs: on 1 CPU core

set -euo pipefail
cd "$(dirname "$0")"
if [[ ! -e common ]]; then # Slurm runs a copy of this file, and knows where it was
    command=$(squeue --noheader --format=%o --jobs="$SLURM_JOB_ID")
    cd "$(dirname "${command%" $*"}")"
fi
source common/env.sh
[[ -f ${1:-} ]] ||
    { echo "Error: no script '${1:-}' in $PWD: type sbatch jobscript_dp.sh SCRIPT.py" >&2; exit 2; }

exec "${PYTHON[@]}" "$@"
