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
: "${1:?name a Python script}"
source common/env.sh
export CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES-0,1} # Slurm sets it to the job's GPUs
exec "${PYTHON[@]}" "$1" $small "${@:2}"
