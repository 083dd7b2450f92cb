#!/bin/bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=14
#SBATCH --gpus-per-node=2
#SBATCH --time=00:20:00

# Two nodes with one process per GPU.
#     sbatch jobscript_ddp_2nodes.sh hsdp.py [OPTIONS]

set -euo pipefail
[[ ${SLURM_JOB_ID:-} ]] || CDPATH= cd "$(dirname "$0")" # a job starts where it was submitted
[[ ${1:--} == -* ]] && echo "Error: name a script: sbatch jobscript_ddp_2nodes.sh SCRIPT.py" >&2 && exit 2
source common/env.sh
source common/launch_nodes.sh
