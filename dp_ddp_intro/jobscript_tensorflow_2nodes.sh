#!/bin/bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=14
#SBATCH --gpus-per-node=2
#SBATCH --time=00:20:00

# TensorFlow: two nodes with one process each, for all GPUs of the node.
#     sbatch jobscript_tensorflow_2nodes.sh tensorflow_scripts/multi_worker_mirrored.py [OPTIONS]

set -euo pipefail
[[ ${SLURM_JOB_ID:-} ]] || CDPATH= cd "$(dirname "$0")" # a job starts where it was submitted
: "${1:?name a Python script}"
FRAMEWORK=tensorflow
source common/env.sh
export TF_CPP_MIN_LOG_LEVEL=2 TF_ENABLE_ONEDNN_OPTS=0 # only warnings and errors
source tensorflow_scripts/launch_workers.sh "$1" $small "${@:2}"
