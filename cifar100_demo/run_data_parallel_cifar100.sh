#!/bin/bash
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --cpus-per-task=14
#SBATCH --gpus-per-node=2
#SBATCH --time=00:30:00

# train_data_parallel.py: one process, two GPUs. monitor_gpus.py records their utilisation.
#     sbatch run_data_parallel_cifar100.sh [OPTIONS]

set -euo pipefail
[[ ${SLURM_JOB_ID:-} ]] || CDPATH= cd "$(dirname "$0")" # a job starts where it was submitted
source common/env.sh
pick_gpus "1-${GPUS:-2}"
"${PYTHON[@]}" monitor_gpus.py "logs/utilisation-${SLURM_JOB_ID:-$$}.csv" $$ & # until this job ends
exec "${PYTHON[@]}" train_data_parallel.py "$@"
