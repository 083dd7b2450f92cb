#!/bin/bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=20
#SBATCH --gres=gpu:2
#SBATCH --time=00:20:00
#SBATCH --output=logs_%j.out
#SBATCH --error=logs_%j.err

# mnist_ddp.py on two nodes: on each as many processes as it has GPUs for this job.
#     sbatch slurm_ddp_2nodes.sh [OPTIONS]
#     bash slurm_ddp_2nodes.sh [OPTIONS]      without Slurm: two launchers play two nodes

set -euo pipefail
cd "$(dirname "$0")"
if [[ ! -e common ]]; then # Slurm runs a copy of this file, and knows where it was
    command=$(squeue --noheader --format=%o --jobs="$SLURM_JOB_ID")
    cd "$(dirname "${command%" $*"}")"
fi
source common/env.sh

set -- mnist_ddp.py "$@"
source common/2nodes.sh
