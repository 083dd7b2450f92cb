#!/bin/bash
#SBATCH --job-name=mnist_DDP_2nodes
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=20
#SBATCH --gres=gpu:2
#SBATCH --time=00:20:00
#SBATCH --output=logs_%j.out
#SBATCH --error=logs_%j.err

# mnist_ddp.py: two nodes, one process and one profile per GPU of the job.
#     sbatch slurm_ddp_2nodes.sh [OPTIONS]

set -euo pipefail
[[ ${SLURM_JOB_ID:-} ]] || CDPATH= cd "$(dirname "$0")" # a job starts where it was submitted
source common/env.sh
mkdir -p logs # the profilers write there, even if the script fails
echo "Running on hosts ${SLURM_JOB_NODELIST:-$(hostname)}"
set_gpus 1 2 # without Slurm: two nodes on this machine, one process on each
LINE_PROFILE=1 source common/launch_nodes.sh \
    mnist_ddp.py --epochs=5 --batch-size=128 $small "$@"
