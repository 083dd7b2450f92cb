# Sourced by env.sh in an interactive shell without Slurm, so that the READMEs' commands work.
# sbatch [OPTIONS] SCRIPT [ARGUMENTS]: run a script at once, without a queue.
sbatch() {
    local gpus=${GPUS:-} nodes=${NODES:-} ignored=()
    while [[ ${1:-} == -* ]]; do
        case $1 in
            --gpus-per-node=* | --gres=gpu:*) gpus=${1##*[=:]} ;;
            --nodes=*) nodes=${1#*=} ;;
            --wait) ;; # it always waits
            *) ignored+=("$1") ;;
        esac
        shift
    done
    if ((${#ignored[@]})); then
        echo "Ignored without Slurm: ${ignored[*]}" >&2
    fi
    if [[ ! -f ${1:-} ]]; then
        echo "Error: no run script ${1:-} in $PWD; write options as --name=value" >&2
        return 2
    fi
    GPUS=$gpus NODES=$nodes bash "$@"
}
echo "No Slurm answers here: sbatch runs a script in this shell, on its GPUs or CPU cores" >&2
# Options for short runs on CPU cores.
SMALL=
if ! has_driver && [[ -f small.txt ]]; then
    SMALL=$(cat small.txt)
    echo "No GPU here: SMALL=\"$SMALL\"" >&2
fi
