#!/bin/bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=14
#SBATCH --gpus-per-node=2
#SBATCH --time=00:20:00

# On each of two nodes as many processes as it has GPUs for this job.
#     sbatch jobscript_ddp_2nodes.sh ddp.py [OPTIONS]
#     bash jobscript_ddp_2nodes.sh ddp.py [OPTIONS]      without Slurm: two launchers play two nodes

set -euo pipefail
cd "$(dirname "$0")"
if [[ ! -e common ]]; then # Slurm runs a copy of this file, and knows where it was
    command=$(squeue --noheader --format=%o --jobs="$SLURM_JOB_ID")
    cd "$(dirname "${command%" $*"}")"
fi
source common/env.sh
[[ -f ${1:-} ]] ||
    { echo "Error: no script '${1:-}' in $PWD: type sbatch jobscript_ddp_2nodes.sh SCRIPT.py" >&2; exit 2; }

source common/2nodes.sh
