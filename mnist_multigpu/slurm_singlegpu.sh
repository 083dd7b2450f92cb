#!/bin/bash
#SBATCH --job-name=mnist_1GPU
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --cpus-per-task=10
#SBATCH --gres=gpu:1
#SBATCH --time=00:20:00
#SBATCH --output=logs_%j.out
#SBATCH --error=logs_%j.err

# mnist_singlegpu.py on one GPU, under kernprof.
#     sbatch slurm_singlegpu.sh [OPTIONS]

set -euo pipefail
[[ ${SLURM_JOB_ID:-} ]] || CDPATH= cd "$(dirname "$0")" # a job starts where it was submitted
source common/env.sh
echo "Running on host $(hostname)"
exec "${PYTHON[@]}" -m kernprof -o "${SLURM_JOB_ID:-$$}_${SLURM_CPUS_PER_TASK:-1}.lprof" \
    -l mnist_singlegpu.py --epochs=5 --batch-size=128 $small "$@"
