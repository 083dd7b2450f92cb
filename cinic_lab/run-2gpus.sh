#!/bin/bash
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --cpus-per-task=14
#SBATCH --gpus-per-node=2
#SBATCH --time=00:20:00

# Two GPUs of one node: two processes for a DDP script, one for DataParallel.
#     sbatch run-2gpus.sh SCRIPT.py [OPTIONS]

set -euo pipefail
[[ ${SLURM_JOB_ID:-} ]] || CDPATH= cd "$(dirname "$0")" # a job starts where it was submitted
source common/env.sh

if ! grep --quiet init_process_group "$1"; then # DataParallel: one process for both GPUs
    pick_gpus "1-${GPUS:-2}"
    exec "${PYTHON[@]}" "$@"
fi
set_gpus 2
exec "${PYTHON[@]}" -m common.torchrun --standalone --nproc-per-node="$GPUS" "$@"
