#!/bin/bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=14
#SBATCH --gpus-per-node=2
#SBATCH --time=00:20:00

# Two nodes, one process per GPU of the job.
#     sbatch run-2nodes.sh SCRIPT.py [OPTIONS]

set -euo pipefail
[[ ${SLURM_JOB_ID:-} ]] || CDPATH= cd "$(dirname "$0")" # a job starts where it was submitted
: "${1:?name a Python script}"
source common/env.sh
set_gpus 1 2 # without Slurm: two nodes on this machine, one process on each
source common/launch_nodes.sh "$1" $small "${@:2}"
