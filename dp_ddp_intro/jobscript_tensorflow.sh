#!/bin/bash
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --cpus-per-task=14
#SBATCH --gpus-per-node=2
#SBATCH --time=00:20:00

# TensorFlow: one process for two GPUs of one node.
#     sbatch jobscript_tensorflow.sh tensorflow/mirrored_strategy.py [OPTIONS]
#     bash jobscript_tensorflow.sh tensorflow/mirrored_strategy.py [OPTIONS]
# The latter without Slurm; without GPUs: on CPU cores

set -euo pipefail
cd "$(dirname "$0")"
if [[ ! -e common ]]; then # Slurm runs a copy of this file, and knows where it was
    command=$(squeue --noheader --format=%o --jobs="$SLURM_JOB_ID")
    cd "$(dirname "${command%" $*"}")"
fi
FRAMEWORK=tensorflow
source common/env.sh
# Warnings and errors alone. oneDNN, which is for CPUs, always says that it is there.
export TF_CPP_MIN_LOG_LEVEL=2 TF_ENABLE_ONEDNN_OPTS=0
[[ -f ${1:-} ]] ||
    { echo "Error: no script '${1:-}' in $PWD: type sbatch jobscript_tensorflow.sh SCRIPT.py" >&2; exit 2; }

exec "${PYTHON[@]}" "$@"
