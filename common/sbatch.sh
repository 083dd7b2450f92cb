# Sourced by env.sh in an interactive shell without Slurm, so that the READMEs' commands work.
# sbatch [OPTIONS] SCRIPT.sh [ARGUMENTS]: run a script at once, without a queue.
sbatch() {
    local typed=$* options= gpus=${GPUS:-} nodes=${NODES:-} small=
    while (($#)) && [[ $1 != *.sh ]]; do
        options+=" $1"
        shift
    done
    if (($# == 0)); then
        echo "Error: no run script (*.sh) in \`sbatch $typed\`: type one before the Python" \
            "script, here one of" *.sh >&2
        return 2
    elif [[ ! -f $1 ]]; then
        echo "Error: no run script '$1' in $PWD, which has" *.sh >&2
        return 2
    fi
    if [[ -f small.txt ]] && ! has_driver; then
        small=$(< small.txt)
        # SMALL is empty if env.sh was sourced in the root or in a lesson without small.txt.
        # Another lesson's options do not fit this lesson's scripts.
        if [[ ! ${SMALL-} || ($SMALL != "$small"* && " $* " == *" $SMALL "*) ]]; then
            echo "Error: SMALL is empty or from another folder: run \`source" \
                "common/env.sh\` here, and your command again" >&2
            return 2
        # A script is for $SMALL if its docstring has it.
        elif [[ " $* " != *" $small "* ]] &&
            { [[ ${2:-} != *.py ]] || grep -qs '\$SMALL' "$2"; }; then
            echo "Without \$SMALL this trains the full-size model on CPU cores, which takes" \
                "long: Ctrl-C stops it" >&2
        fi
    fi
    if [[ $options =~ ' --'(gpus-per-node|gres)[=\ ]([A-Za-z0-9_]+:)*([0-9]+) ]]; then
        gpus=${BASH_REMATCH[3]}
    fi
    if [[ $options =~ ' -'(N ?|-nodes[=\ ])([0-9]+) ]]; then
        nodes=${BASH_REMATCH[2]}
    fi
    GPUS=$gpus NODES=$nodes bash "$@"
}
SMALL= # options for short runs on CPU cores: empty with a GPU
where=
if [[ -f small.txt ]]; then
    has_driver || SMALL=$(< small.txt)
elif [[ ! -L common ]]; then # in a lesson's folder common is a link
    where=" (run this in a lesson's folder to set it)"
fi
echo "No Slurm here: sbatch runs scripts in this shell, and reads only --nodes," \
    "--gpus-per-node and --gres. SMALL=\"$SMALL\"$where" >&2
