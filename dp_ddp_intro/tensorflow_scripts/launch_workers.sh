# Sourced by jobscript_tensorflow_2nodes.sh: runs "$@" on each node. Without Slurm, two
# processes stand in for the nodes.
if [[ ${SLURM_JOB_ID:-} ]]; then
    exec srun --overlap --nodes="$SLURM_NNODES" --ntasks="$SLURM_NNODES" --ntasks-per-node=1 \
        --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" --kill-on-bad-exit=1 "${PYTHON[@]}" "$@"
fi
gpus=$(nvidia-smi --list-gpus 2> /dev/null | wc -l) || true
port=$((10000 + $$ % 20000))
workers="\"localhost:$port\", \"localhost:$((port + 1))\""
worker() { # worker NUMBER SCRIPT [OPTIONS]
    export TF_CONFIG="{\"cluster\": {\"worker\": [$workers]}, \"task\": {\"type\": \"worker\", \"index\": $1}}"
    ((gpus >= 2)) && export CUDA_VISIBLE_DEVICES=$1 || export CUDA_VISIBLE_DEVICES=-1
    exec "${PYTHON[@]}" "${@:2}"
}
trap 'kill $(jobs -p) 2> /dev/null || true' EXIT
worker 0 "$@" &
worker 1 "$@" &
wait -n # if one worker fails, the script ends here and the trap stops the other
wait -n
