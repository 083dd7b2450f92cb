#!/bin/bash
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --cpus-per-task=14
#SBATCH --gpus-per-node=2
#SBATCH --time=00:30:00

# train_ddp_cifar100.py: two processes, one GPU each. monitor_gpus.py records their utilisation.
#     sbatch run_ddp_cifar100.sh [OPTIONS]

set -euo pipefail
[[ ${SLURM_JOB_ID:-} ]] || CDPATH= cd "$(dirname "$0")" # a job starts where it was submitted
source common/env.sh
set_gpus 2
"${PYTHON[@]}" monitor_gpus.py "logs/utilisation-${SLURM_JOB_ID:-$$}.csv" $$ & # until this job ends
exec "${PYTHON[@]}" -m common.torchrun --standalone --local-addr=127.0.0.1 \
    --nproc-per-node="$GPUS" train_ddp_cifar100.py $small "$@"
