#!/bin/bash
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --cpus-per-task=14
#SBATCH --gpus-per-node=2
#SBATCH --time=00:20:00

# One process for two GPUs on one node.
#     sbatch jobscript_dp.sh dp.py [OPTIONS]

set -euo pipefail
[[ ${SLURM_JOB_ID:-} ]] || CDPATH= cd "$(dirname "$0")" # a job starts where it was submitted
[[ ${1:--} == -* ]] && echo "Error: name a script: sbatch jobscript_dp.sh SCRIPT.py" >&2 && exit 2
source common/env.sh
pick_gpus "1-${GPUS:-2}"
exec "${PYTHON[@]}" "$@"
