#!/bin/bash
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --cpus-per-task=14
#SBATCH --gpus-per-node=2
#SBATCH --time=01:00:00

# 2 processes on one node, each with its own GPU.
#     sbatch run-2gpus.sh SCRIPT.py [OPTIONS]

set -euo pipefail
[[ ${SLURM_JOB_ID:-} ]] || CDPATH= cd "$(dirname "$0")" # a job starts where it was submitted
[[ ${1:--} == -* ]] && echo "Error: name a script: sbatch run-2gpus.sh SCRIPT.py" >&2 && exit 2
source common/env.sh
set_gpus 2
exec "${PYTHON[@]}" -m common.torchrun --standalone --nproc-per-node="$GPUS" "$@"
