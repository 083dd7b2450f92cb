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
[[ ${SLURM_JOB_ID:-} ]] || CDPATH= cd "$(dirname "$0")" # a job is where it was submitted
[[ -f model_parallel.py ]] || { echo "Error: type cd dp_ddp_intro first" >&2; exit 2; }
FRAMEWORK=tensorflow
[[ -d common ]] || { echo "Error: type rm common; ln -s ../common common" >&2; exit 2; }
source common/env.sh
need_script jobscript_tensorflow.sh "$@"

pick_gpus "1-${GPUS:-2}"
exec "${PYTHON[@]}" "$@"
