#!/bin/bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=7
#SBATCH --gpus-per-node=1
#SBATCH --time=02:00:00

# On each of two nodes one process, with a GPU of its own.
#     sbatch run-2nodes.sh SCRIPT.py [OPTIONS]
#     bash run-2nodes.sh SCRIPT.py [OPTIONS]      without Slurm: two launchers play two nodes

set -euo pipefail
cd "$(dirname "$0")"
if [[ ! -e common ]]; then # Slurm runs a copy of this file, and knows where it was
    command=$(squeue --noheader --format=%o --jobs="$SLURM_JOB_ID")
    cd "$(dirname "${command%" $*"}")"
fi
source common/env.sh
[[ -f ${1:-} ]] ||
    { echo "Error: no script '${1:-}' in $PWD: type sbatch run-2nodes.sh SCRIPT.py" >&2; exit 2; }

source common/2nodes.sh
