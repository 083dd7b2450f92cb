# Sourced by env.sh in an interactive shell without Slurm, so that the READMEs' commands work.
# sbatch [OPTIONS] SCRIPT.sh [ARGUMENTS]: run a script at once, without a queue.
sbatch() {
    local gpus=${GPUS:-} nodes=${NODES:-}
    while [[ ${1:-} == -* ]]; do
        case $1 in
            --gpus-per-node=* | --gres=*) gpus=${1##*[=:]} ;;
            --nodes=*) nodes=${1#*=} ;;
        esac
        shift
    done
    if [[ ${1:-} != *.sh ]]; then
        echo "Error: name a run script before the Python script, here one of" *.sh >&2
        return 2
    fi
    GPUS=$gpus NODES=$nodes bash "$@"
}
echo "No Slurm here: sbatch runs scripts in this shell, and reads only --nodes=," \
    "--gpus-per-node= and --gres=" >&2
