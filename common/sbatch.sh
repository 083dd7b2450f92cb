# Sourced by env.sh in an interactive shell without Slurm, so that the READMEs' commands work.
# sbatch [OPTIONS] SCRIPT.sh [ARGUMENTS]: run a script at once, without a queue.
sbatch() {
    local options= gpus=${GPUS:-} nodes=${NODES:-}
    while (($#)) && [[ $1 != *.sh ]]; do
        options+=" $1"
        shift
    done
    if [[ ! -f ${1:-} ]]; then
        echo "Error: no run script '${1:-}' in $PWD: run \`sbatch run.sh SCRIPT.py\`" >&2
        return 2
    fi
    if [[ $options =~ ' --'(gpus-per-node|gres)[=\ ]([a-z0-9]+:)*([0-9]+) ]]; then
        gpus=${BASH_REMATCH[3]}
    fi
    if [[ $options =~ ' -'(N ?|-nodes[=\ ])([0-9]+) ]]; then
        nodes=${BASH_REMATCH[2]}
    fi
    GPUS=$gpus NODES=$nodes bash "$@"
}
SMALL= # options for short runs on CPU cores: empty with a GPU, and outside of the lessons
if [[ -f small.txt ]] && ! has_driver; then
    SMALL=$(< small.txt)
fi
echo "No Slurm here: sbatch runs scripts in this shell, and reads only --nodes," \
    "--gpus-per-node and --gres. SMALL=\"$SMALL\"" >&2
