#!/bin/bash
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --cpus-per-task=14
#SBATCH --gpus-per-node=2
#SBATCH --time=00:20:00

# Two processes on one node, each with a GPU of its own.
#     sbatch jobscript_ddp.sh ddp.py [OPTIONS]
#     bash jobscript_ddp.sh ddp.py [OPTIONS]      without Slurm; without GPUs: on 2 CPU cores

set -euo pipefail
cd "$(dirname "$0")"
if [[ ! -e common ]]; then # Slurm runs a copy of this file, and knows where it was
    command=$(squeue --noheader --format=%o --jobs="$SLURM_JOB_ID")
    cd "$(dirname "${command%" $*"}")"
fi
source common/env.sh
[[ -f ${1:-} ]] ||
    { echo "Error: no script '${1:-}' in $PWD: type sbatch jobscript_ddp.sh SCRIPT.py" >&2; exit 2; }

gpus 2
exec "${PYTHON[@]}" -m common.torchrun --standalone \
    --nproc-per-node="${SLURM_GPUS_ON_NODE:-2}" "$@"
