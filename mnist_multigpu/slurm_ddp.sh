#!/bin/bash
#SBATCH --job-name=mnist_DDP
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --cpus-per-task=20
#SBATCH --gres=gpu:2
#SBATCH --time=00:20:00
#SBATCH --output=logs_%j.out
#SBATCH --error=logs_%j.err

# mnist_ddp.py: two processes on one node, each with its own GPU and profile.
#     sbatch slurm_ddp.sh [OPTIONS]

set -euo pipefail
[[ ${SLURM_JOB_ID:-} ]] || CDPATH= cd "$(dirname "$0")" # a job starts where it was submitted
source common/env.sh
set_gpus 2
echo "Running on host $(hostname)"
mkdir -p logs # the profiler writes there, even if the script fails
LINE_PROFILE=1 exec "${PYTHON[@]}" -m common.torchrun --standalone \
    --local-addr=127.0.0.1 --nproc-per-node="$GPUS" \
    mnist_ddp.py --epochs=5 --batch-size=128 $small "$@"
