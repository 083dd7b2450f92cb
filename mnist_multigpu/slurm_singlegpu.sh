#!/bin/bash
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --cpus-per-task=10
#SBATCH --gres=gpu:1
#SBATCH --time=00:20:00
#SBATCH --output=logs_%j.out
#SBATCH --error=logs_%j.err

# mnist_singlegpu.py, on one GPU.
#     sbatch slurm_singlegpu.sh [OPTIONS]
#     bash slurm_singlegpu.sh [OPTIONS]      without Slurm; without GPUs: on 1 CPU core

set -euo pipefail
cd "$(dirname "$0")"
if [[ ! -e common ]]; then # Slurm runs a copy of this file, and knows where it was
    command=$(squeue --noheader --format=%o --jobs="$SLURM_JOB_ID")
    cd "$(dirname "${command%" $*"}")"
fi
source common/env.sh

exec "${PYTHON[@]}" mnist_singlegpu.py "$@"
