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
export CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES-0,1} # Slurm sets it to the job's GPUs
"${PYTHON[@]}" monitor_gpus.py "logs/utilisation-${SLURM_JOB_ID:-$$}.csv" $$ & # until this job ends
exec "${PYTHON[@]}" train_data_parallel.py $small "$@"
