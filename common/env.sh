# Sourced by every run script, and by you on a login node. It sets PYTHON, the command that
# starts a Python with PyTorch (in your shell, `python`), and whatever else
# common/sites/NAME.sh says. With FRAMEWORK=tensorflow it is a Python with TensorFlow.
# NAME: $SITE, else the name of the Slurm cluster, else venv. It never exits your shell.
common=$(CDPATH= cd -P "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# A job is told the name of its cluster; on a login node it is in Slurm's configuration.
conf=${SLURM_CONF:-/etc/slurm/slurm.conf}
name='s/^ *ClusterName *= *\([^ #]*\).*/\1/Ip'
cluster=${SLURM_CLUSTER_NAME:-$(sed -n "$name" "$conf" 2> /dev/null || true)}
site=${SITE:-${cluster,,}} site=${site:-venv} # the files' names are in small letters
if [[ ! -f $common/sites/$site.sh && ! ${SITE:-} ]]; then
    site=venv
fi
if [[ ! -f $common/sites/$site.sh ]]; then
    sites=$(CDPATH= cd "$common/sites" && echo *.sh)
    echo "Error: no common/sites/$site.sh: set SITE to one of ${sites//.sh/}" >&2
    return 2
fi
visible_gpus() { # as the variables name them: a job's log tells which these were
    local named=${ROCR_VISIBLE_DEVICES-${HIP_VISIBLE_DEVICES-${CUDA_VISIBLE_DEVICES-all}}}
    if has_driver; then echo "$named"; else echo none; fi
}
has_driver() { # and no variable hides the GPUs; to ask PyTorch takes some seconds
    local named=${ROCR_VISIBLE_DEVICES-${HIP_VISIBLE_DEVICES-${CUDA_VISIBLE_DEVICES-all}}}
    [[ ! $named =~ ^(-1)?$ ]] &&
        { compgen -G '/dev/nvidia[0-9]*' || compgen -G /dev/kfd || compgen -G /dev/dxg; } > /dev/null
}
need_account() { # of a site whose DATADIR is a project's: sets account, or says what to type
    account=${SBATCH_ACCOUNT:-${SLURM_JOB_ACCOUNT:-}}
    if [[ ! $account && ! ${DATADIR:-} ]]; then
        echo "Error: which project? Type \`export SBATCH_ACCOUNT=$1\`" >&2
        return 2
    fi
}

PYTHON=(python)
framework=${FRAMEWORK:-torch}
source "$common/sites/$site.sh" || return 2
if [[ ${#PYTHON[@]} == 1 && $PYTHON == *\ * ]]; then
    echo "Error: PYTHON is one word in common/sites/$site.sh: write PYTHON=($PYTHON)" >&2
    return 2
fi
if [[ ! ${GPUS:-1} =~ ^[1-9][0-9]*$ ]]; then
    echo "Error: GPUS=$GPUS: type a number, such as GPUS=4" >&2
    return 2
fi
if [[ ! ${SLURM_GPUS_ON_NODE:-1} =~ ^[1-9][0-9]*$ ]]; then
    echo "Error: SLURM_GPUS_ON_NODE=$SLURM_GPUS_ON_NODE is no number: type" \
        "\`unset SLURM_GPUS_ON_NODE\`" >&2
    return 2
fi
# A job that does no step for so many seconds is ended by common.torchrun. PyTorch would do so
# after 30 minutes, with any backend: no script names one (PyTorch's 10 minutes are for "nccl").
export DDP_TIMEOUT=${DDP_TIMEOUT:-540}
if [[ ! $DDP_TIMEOUT =~ ^[1-9][0-9]*$ ]]; then
    echo "Error: DDP_TIMEOUT=$DDP_TIMEOUT: type a number of seconds, such as DDP_TIMEOUT=600" >&2
    return 2
fi
if [[ $- == *i* ]]; then # you type python; a script that did would not learn its number, $!
    python() { command "${PYTHON[@]}" "$@"; }
fi
packages=("$framework")
if [[ $framework == torch ]]; then
    packages+=(torchvision tensorboard tqdm)
    [[ ${SLURM_JOB_ID:-} ]] || packages+=(matplotlib) # plots are not drawn by jobs
    [[ ! -f mnist_singlegpu.py ]] || packages+=(line_profiler) # one room alone profiles lines
fi
# To look a package up is quick, to import it is not. A folder of its name has no origin.
find='import sys; from importlib.util import find_spec as f
missing = [name for name in sys.argv[1:] if not getattr(f(name), "origin", 0)]
print(*missing); sys.exit(bool(missing))'
if ! missing=$("${PYTHON[@]}" -c "$find" "${packages[@]}" 2> /dev/null); then
    repository=$(dirname "$common")
    if [[ ! $missing || $missing == "$framework" || $missing == "$framework "* ]]; then
        name=PyTorch venv=venv
        [[ $framework == torch ]] || name=TensorFlow venv=venv-tensorflow
        how="type \`make $venv\` in $repository, or name your site, SITE=..."
        [[ $site == venv ]] || how="see common/sites/$site.sh, or type \`export SITE=venv\`"
        echo "Error: no $name for ${PYTHON[*]}: $how" >&2
    elif [[ $site == venv && -d $repository/.venv ]]; then # older than requirements.txt
        echo "Error: no ${missing// /, } for python: type \`make venv\` in $repository" >&2
    else
        pip="pip install --user" # which pip refuses in an environment of one's own
        [[ ! ${VIRTUAL_ENV:-${CONDA_PREFIX:-}} ]] || pip="pip install"
        echo "Error: no ${missing// /, } for SITE=$site: type" \
            "\`python -m $pip $missing\` on a login node," \
            "or see docs/CLUSTER.md#a-package-is-missing" >&2
    fi
    return 2
fi

# What is printed is at once in the job's output.
export PYTHONUNBUFFERED=1
# TensorFlow: warnings and errors alone. oneDNN, for CPUs, always says that it is there.
export TF_CPP_MIN_LOG_LEVEL=${TF_CPP_MIN_LOG_LEVEL:-2} TF_ENABLE_ONEDNN_OPTS=0
# torch.profiler: no messages of its own; one is an ERROR that there is no GPU.
export KINETO_LOG_LEVEL=${KINETO_LOG_LEVEL:-6}
unset PYTHONSAFEPATH # or a script would not find the folder common beside it
# One thread a process: a GPU needs no more, and without GPUs one core plays one GPU.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

# need_script RUN_SCRIPT "$@": its first argument is a script, or the job ends here.
need_script() {
    if [[ ! -f ${2:-} ]]; then
        echo "Error: no script '${2:-}' in $PWD: type sbatch $1 SCRIPT.py" >&2
        exit 2
    fi
}

# gpus N [NODES]: sets GPUS, the processes of a node: Slurm's number, or yours if you type
# GPUS=4 in front of bash, else N. Outside of Slurm, if these are more than there are GPUs
# here, use CPU cores instead.
gpus() {
    GPUS=${SLURM_GPUS_ON_NODE:-${GPUS:-$1}}
    local wanted=$((GPUS * ${2:-1})) here advice=""
    if has_driver && [[ ! ${SLURM_JOB_ID:-} ]]; then
        here=$("${PYTHON[@]}" -m common.device)
        if ((here < wanted)); then
            ((here != 1 || ${2:-1} > 1)) || advice=", or put GPUS=1 in front to use the GPU"
            echo "GPUs here: $here, wanted: $wanted. This runs on CPU cores, and takes long" \
                "without the small options of the README: add these$advice" >&2
            export CUDA_VISIBLE_DEVICES=-1 HIP_VISIBLE_DEVICES=-1 # AMD's takes '' for all GPUs
            for_cpus
        fi
    fi
}

# pick_gpus PLACES: outside of Slurm, use only the GPUs in these places, such as 2 or 1-2, of
# CUDA_VISIBLE_DEVICES. If that is not set, it is 0,1,2 and so on.
pick_gpus() {
    [[ ! ${SLURM_JOB_ID:-} ]] || return 0
    local all=${HIP_VISIBLE_DEVICES-${CUDA_VISIBLE_DEVICES-$(seq -s, 0 63)}}
    CUDA_VISIBLE_DEVICES=$(cut --delimiter=, --fields="$1" <<< "$all")
    export CUDA_VISIBLE_DEVICES
    # AMD's goes by this one, if it is set.
    [[ ! -v HIP_VISIBLE_DEVICES ]] || HIP_VISIBLE_DEVICES=$CUDA_VISIBLE_DEVICES
}

# So long nodes wait for each other at most: on a slow disk PyTorch may take minutes to start.
limit=$((DDP_TIMEOUT < 300 ? DDP_TIMEOUT : 300))
export PET_RDZV_CONF=join_timeout=$limit,read_timeout=$limit,timeout=$limit # for torchrun

for_cpus() { # keep memory for the next step: to get it anew costs a fifth of tinyvgg's time
    export MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=4000000000
}
has_driver || for_cpus
