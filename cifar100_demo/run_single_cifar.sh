#!/bin/bash
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --cpus-per-task=7
#SBATCH --gpus-per-node=1
#SBATCH --time=00:30:00

# train_cifar100.py: one GPU. monitor_gpus.py records its utilisation.
#     sbatch run_single_cifar.sh [OPTIONS]

set -euo pipefail
[[ ${SLURM_JOB_ID:-} ]] || CDPATH= cd "$(dirname "$0")" # a job starts where it was submitted
source common/env.sh

"${PYTHON[@]}" monitor_gpus.py "logs/utilisation-${SLURM_JOB_ID:-$$}.csv" $$ & # until this job ends
exec "${PYTHON[@]}" train_cifar100.py $small "$@"
