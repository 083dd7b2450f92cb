#!/bin/bash
#SBATCH --job-name=mnist_DDP
##SBATCH --reservation=NAME
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --cpus-per-task=20
#SBATCH --gres=gpu:2
#SBATCH --time=00:20:00
#SBATCH --output=logs_%j.out
#SBATCH --error=logs_%j.err

# mnist_ddp.py, two processes on one node, each with a GPU of its own.
#     sbatch slurm_ddp.sh [OPTIONS]
#     bash slurm_ddp.sh [OPTIONS]      without Slurm; without GPUs: on 2 CPU cores
# LINE_PROFILE=1 in front makes each process write a line profile to logs/.

set -euo pipefail
[[ ${SLURM_JOB_ID:-} ]] || CDPATH= cd "$(dirname "$0")" # a job is where it was submitted
[[ -f mnist_singlegpu.py ]] || { echo "Error: type cd mnist_multigpu first" >&2; exit 2; }
[[ -d common ]] || { echo "Error: type rm common; ln -s ../common common" >&2; exit 2; }
source common/env.sh

gpus 2
echo "Running on host $(hostname), GPUs: $(visible_gpus)"
exec "${PYTHON[@]}" -m common.torchrun --standalone \
    --nproc-per-node="$GPUS" mnist_ddp.py --epochs=5 --batch-size=128 "$@"
