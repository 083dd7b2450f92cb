#!/bin/bash
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --cpus-per-task=7
#SBATCH --gpus-per-node=1
#SBATCH --time=00:20:00

# One process on one GPU.
#     sbatch jobscript.sh single.py [OPTIONS]

set -euo pipefail
[[ ${SLURM_JOB_ID:-} ]] || CDPATH= cd "$(dirname "$0")" # a job starts where it was submitted
: "${1:?name a Python script}"
source common/env.sh
exec "${PYTHON[@]}" "$1" $small "${@:2}"
