#!/bin/bash
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --cpus-per-task=14
#SBATCH --gpus-per-node=2
#SBATCH --time=00:20:00

# 2 processes on one node, each with its own GPU.
#     sbatch run-2gpus.sh SCRIPT.py [OPTIONS]

set -euo pipefail
[[ ${SLURM_JOB_ID:-} ]] || CDPATH= cd "$(dirname "$0")" # a job starts where it was submitted
: "${1:?name a Python script}"
source common/env.sh
set_gpus 2
exec "${PYTHON[@]}" -m common.torchrun --standalone --local-addr=127.0.0.1 \
    --nproc-per-node="$GPUS" "$1" $small "${@:2}"
