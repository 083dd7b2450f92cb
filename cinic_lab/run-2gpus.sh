#!/bin/bash
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --cpus-per-task=14
#SBATCH --gpus-per-node=2
#SBATCH --time=02:00:00

# Two GPUs of one node: for a DDP script two processes, for DataParallel one.
#     sbatch run-2gpus.sh SCRIPT.py [OPTIONS]
#     bash run-2gpus.sh SCRIPT.py [OPTIONS]      without Slurm; without GPUs: on 2 CPU cores

set -euo pipefail
[[ ${SLURM_JOB_ID:-} ]] || CDPATH= cd "$(dirname "$0")" # a job is where it was submitted
[[ -f cinic.py ]] || { echo "Error: type cd cinic_lab first" >&2; exit 2; }
[[ -d common ]] || { echo "Error: type rm common; ln -s ../common common" >&2; exit 2; }
source common/env.sh
need_script run-2gpus.sh "$@"

if ! grep --quiet init_process_group "$1"; then # DataParallel: one process for both GPUs
    pick_gpus "1-${GPUS:-2}"
    exec "${PYTHON[@]}" "$@"
fi
gpus 2
exec "${PYTHON[@]}" -m common.torchrun --standalone \
    --nproc-per-node="$GPUS" "$@"
