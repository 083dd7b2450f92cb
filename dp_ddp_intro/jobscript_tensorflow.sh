#!/bin/bash
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --cpus-per-task=14
#SBATCH --gpus-per-node=2
#SBATCH --time=00:20:00

# TensorFlow: one process for two GPUs on one node.
#     sbatch jobscript_tensorflow.sh tensorflow_scripts/mirrored_strategy.py [OPTIONS]

set -euo pipefail
[[ ${SLURM_JOB_ID:-} ]] || CDPATH= cd "$(dirname "$0")" # a job starts where it was submitted
: "${1:?name a Python script}"
FRAMEWORK=tensorflow
source common/env.sh
export TF_CPP_MIN_LOG_LEVEL=2 TF_ENABLE_ONEDNN_OPTS=0 # only warnings and errors
export CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES-0,1} # Slurm sets it to the job's GPUs
exec "${PYTHON[@]}" "$1" $small "${@:2}"
