# Sourced by env.sh in an interactive shell without Slurm, so that the READMEs' commands work.
# sbatch [OPTIONS] SCRIPT [ARGUMENTS]: run a script at once, without a queue.
sbatch() {
    local gpus=${GPUS:-} nodes=${NODES:-} ignored=() option
    while [[ ${1:-} == -* ]]; do
        option=$1
        shift
        # "-N 2" means "-N=2".
        if [[ $option != *=* && ${1:-} =~ ^[^-] && $1 != *.* ]]; then
            option+="=$1"
            shift
        fi
        case $option in
            --gpus-per-node=* | --gres=gpu:*) gpus=${option##*[=:]} ;;
            --nodes=* | -N=*) nodes=${option#*=} ;;
            --wait | -W) ;; # it always waits
            *) ignored+=("$option") ;;
        esac
    done
    if ((${#ignored[@]})); then
        echo "Ignored without Slurm: ${ignored[*]}" >&2
    fi
    if ! grep -q '^#!' "${1:-}" 2> /dev/null; then
        echo "Error: '${1:-}' is not a run script in $PWD: put one first, such as run.sh" >&2
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
