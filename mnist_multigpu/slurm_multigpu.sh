#!/bin/bash
#SBATCH --job-name=mnist_multiGPU
#SBATCH --nodes=1
#SBATCH --ntasks=2
#SBATCH --cpus-per-task=10
#SBATCH --gres=gpu:2
#SBATCH --time=00:20:00
#SBATCH --output=logs_%j.out
#SBATCH --error=logs_%j.err

# mnist_multigpu.py on two GPUs, under kernprof.
#     sbatch slurm_multigpu.sh [OPTIONS]

set -euo pipefail
[[ ${SLURM_JOB_ID:-} ]] || CDPATH= cd "$(dirname "$0")" # a job starts where it was submitted
source common/env.sh
export CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES-0,1} # Slurm sets it to the job's GPUs
echo "Running on host $(hostname)"
exec "${PYTHON[@]}" -m kernprof -o "${SLURM_JOB_ID:-$$}_${SLURM_CPUS_PER_TASK:-1}.lprof" \
    -l mnist_multigpu.py --epochs=5 --batch-size=128 $small "$@"
