# Sourced by every run script, and by you on a login node: puts a Python with PyTorch on your
# PATH, as common/sites/NAME.sh says (with FRAMEWORK=tensorflow, one with TensorFlow).
# NAME: $SITE, else the name of the Slurm cluster, else venv. It never exits your shell.
common=$(CDPATH= cd -P "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# A job is told the name of its cluster; on a login node it is in Slurm's configuration.
name='s/^ *ClusterName *= *\([^ #]*\).*/\1/Ip'
cluster=$(sed -n "$name" "${SLURM_CONF:-/etc/slurm/slurm.conf}" 2> /dev/null || true)
cluster=${SLURM_CLUSTER_NAME:-$cluster}
site=${SITE:-${cluster,,}} # the files' names are in small letters
if [[ ! ${SITE:-} && ! -f $common/sites/$site.sh ]]; then
    site=venv
fi
for name in GPUS NODES SLURM_GPUS_ON_NODE DDP_TIMEOUT; do
    if [[ ! ${!name:-1} =~ ^[1-9][0-9]{0,5}$ ]]; then
        echo "Error: $name=${!name} is not a number from 1 on: run \`unset $name\`" >&2
        return 2
    fi
done
if [[ $0 == *.sh && ${1:-} == *.py && ! -f $1 ]]; then
    echo "Error: no script $1 in $PWD" >&2
    return 2
fi

has_driver() { # and no variable hides the GPUs; to ask PyTorch takes some seconds
    local named=${ROCR_VISIBLE_DEVICES-${HIP_VISIBLE_DEVICES-${CUDA_VISIBLE_DEVICES-all}}}
    [[ ! $named =~ ^(-1)?$ ]] &&
        { compgen -G '/dev/nvidia[0-9]*' || compgen -G /dev/kfd || compgen -G /dev/dxg; } > /dev/null
}

PYTHON=(python) framework=${FRAMEWORK:-torch}
source "$common/sites/$site.sh" || return 2
# To look a package up is quick, to import it is not. A folder of its name has no origin.
find="from importlib.util import find_spec; exit(not find_spec('$framework').origin)"
if ! "${PYTHON[@]}" -c "$find" 2> /dev/null; then
    echo "Error: no $framework for ${PYTHON[*]}: run \`make venv\` in" \
        "$(dirname "$common"), or see $common/sites/$site.sh" >&2
    return 2
fi
if [[ $- == *i* ]]; then # you type python; a script that did would not learn its number, $!
    python() { command "${PYTHON[@]}" "$@"; }
    timeout 5 sinfo > /dev/null 2>&1 || source "$common/sbatch.sh"
fi

export PYTHONUNBUFFERED=1 # what is printed is at once in the job's output
export KINETO_LOG_LEVEL=${KINETO_LOG_LEVEL:-6} # torch.profiler: no messages of its own
unset PYTHONSAFEPATH # or a script would not find the folder common beside it
# One thread a process: a GPU needs no more, and without GPUs each core stands in for one.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

tune_malloc() { # keep memory for the next step: reallocating costs tinyvgg 20 %
    export MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=4000000000
}
has_driver || tune_malloc

# set_gpus N [NODES]: sets GPUS, the processes of a node: Slurm's number, or yours if you type
# GPUS=4 in front of bash, else N. Outside of Slurm, too few GPUs mean CPU cores instead.
set_gpus() {
    GPUS=${SLURM_GPUS_ON_NODE:-${GPUS:-$1}}
    if [[ ! ${SLURM_JOB_ID:-} ]] && has_driver; then
        local here wanted=$((GPUS * ${2:-1}))
        here=$("${PYTHON[@]}" -m common.device)
        if ((here < wanted)); then
            echo "GPUs here: $here, wanted: $wanted. This runs on CPU cores: add the small" \
                "options of the README, or put GPUS=1 in front to use one GPU" >&2
            export CUDA_VISIBLE_DEVICES=-1 HIP_VISIBLE_DEVICES=-1 # AMD's takes '' for all
            tune_malloc
        fi
    fi
}

# pick_gpus PLACES: outside of Slurm, use only the GPUs in these places, such as 2 or 1-2, of
# CUDA_VISIBLE_DEVICES. If that is not set, it is 0,1,2 and so on.
pick_gpus() {
    [[ ! ${SLURM_JOB_ID:-} ]] || return 0
    local all=${HIP_VISIBLE_DEVICES-${CUDA_VISIBLE_DEVICES-$(seq -s, 0 63)}}
    CUDA_VISIBLE_DEVICES=$(cut --delimiter=, --fields="$1" <<< "$all")
    HIP_VISIBLE_DEVICES=$CUDA_VISIBLE_DEVICES # AMD's goes by this one, if it is set
    export CUDA_VISIBLE_DEVICES HIP_VISIBLE_DEVICES
}
