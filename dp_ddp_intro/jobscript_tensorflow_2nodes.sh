#!/bin/bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=14
#SBATCH --gpus-per-node=2
#SBATCH --time=00:20:00

# TensorFlow: two nodes with one process each, for all GPUs of the node.
#     sbatch jobscript_tensorflow_2nodes.sh tensorflow_scripts/multi_worker_mirrored.py [OPTIONS]
# Without Slurm, two processes stand in for the nodes.

set -euo pipefail
[[ ${SLURM_JOB_ID:-} ]] || CDPATH= cd "$(dirname "$0")" # a job starts where it was submitted
[[ ${1:--} == -* ]] && echo "Error: name a script: sbatch jobscript_tensorflow_2nodes.sh SCRIPT.py" >&2 && exit 2
FRAMEWORK=tensorflow
source common/env.sh
export TF_CPP_MIN_LOG_LEVEL=2 TF_ENABLE_ONEDNN_OPTS=0 # only warnings and errors

if [[ ${SLURM_JOB_ID:-} ]]; then
    exec srun --overlap --nodes="$SLURM_NNODES" --ntasks="$SLURM_NNODES" --ntasks-per-node=1 \
        --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" --kill-on-bad-exit=1 "${PYTHON[@]}" "$@"
fi
gpus=$(nvidia-smi --list-gpus 2> /dev/null | wc -l) || true
((gpus >= 2)) || export CUDA_VISIBLE_DEVICES=-1
port=$((10000 + $$ % 20000))
workers="\"localhost:$port\", \"localhost:$((port + 1))\""
worker() { # worker NUMBER SCRIPT [OPTIONS]
    export TF_CONFIG="{\"cluster\": {\"worker\": [$workers]}, \"task\": {\"type\": \"worker\", \"index\": $1}}"
    pick_gpus $(($1 + 1))
    exec "${PYTHON[@]}" "${@:2}"
}
trap 'kill $(jobs -p) 2> /dev/null || true' EXIT
worker 0 "$@" &
worker 1 "$@" &
wait -n # if one worker fails, the script ends here and the trap stops the other
wait -n
