#!/bin/bash
#SBATCH --job-name=mnist_1GPU
##SBATCH --reservation=NAME
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
[[ ${SLURM_JOB_ID:-} ]] || CDPATH= cd "$(dirname "$0")" # a job is where it was submitted
[[ -f mnist_singlegpu.py ]] || { echo "Error: type cd mnist_multigpu first" >&2; exit 2; }
[[ -d common ]] || { echo "Error: type rm common; ln -s ../common common" >&2; exit 2; }
source common/env.sh

echo "Running on host $(hostname), GPUs: $(visible_gpus)"
exec "${PYTHON[@]}" mnist_singlegpu.py --epochs=5 --batch-size=128 "$@"
