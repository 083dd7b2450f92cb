# Sets PYTHON to a Python with PyTorch, and what runs need in their environment. Every run
# script sources this; in your terminal it also defines `python` and, without Slurm, `sbatch`.
# common/sites/NAME.sh says which Python; NAME is $SITE, else the Slurm cluster's name, else
# venv. FRAMEWORK=tensorflow selects a Python with TensorFlow.
common=$(CDPATH= cd -P "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# Slurm tells a job its cluster's name; on a login node it is in Slurm's configuration.
name='s/^ *ClusterName *= *\([^ #]*\).*/\1/Ip'
cluster=$(sed -n "$name" "${SLURM_CONF:-/etc/slurm/slurm.conf}" 2> /dev/null || true)
cluster=${SLURM_CLUSTER_NAME:-$cluster}
site=${SITE:-${cluster,,}} # file names are in lower case
[[ ${SITE:-} || -f $common/sites/$site.sh ]] || site=venv
if [[ ! -f $common/sites/$site.sh ]]; then
    sites=$(basename -s .sh "$common"/sites/*)
    echo "Error: no common/sites/$site.sh: set SITE to one of" $sites >&2
    return 2
fi
# A run script's arguments are also this file's: $1 is the Python script.
if [[ $0 == *.sh && ${1:-} == *.py && ! -f $1 ]]; then
    echo "Error: no script $1 in $PWD" >&2
    return 2
fi

# Whether there is a driver, and no variable hides the GPUs. Asking PyTorch would take seconds.
has_driver() {
    local named=${ROCR_VISIBLE_DEVICES-${HIP_VISIBLE_DEVICES-${CUDA_VISIBLE_DEVICES-all}}}
    [[ ! $named =~ ^(-1)?$ && $(compgen -G '/dev/*') =~ /dev/(nvidia[0-9]|kfd|dxg) ]]
}

PYTHON=(python) framework=${FRAMEWORK:-torch}
source "$common/sites/$site.sh" || return 2
# Looking a package up is faster than importing it. Namespace packages have origin None.
find="import sys, importlib.util as u; sys.exit(not u.find_spec('$framework').origin)"
if ! "${PYTHON[@]}" -c "$find" 2> /dev/null; then
    echo "Error: no $framework for ${PYTHON[*]}: run \`make venv\` in" \
        "$(dirname "$common"), or see $common/sites/$site.sh" >&2
    return 2
fi
if [[ $- == *i* ]]; then # not in scripts, where `python &` would have the function's PID
    python() { command "${PYTHON[@]}" "$@"; }
    type -P sbatch > /dev/null || source "$common/sbatch.sh"
fi

export PYTHONUNBUFFERED=1 # output appears in the job's file at once
# PyTorch's C++ prints only errors: its warnings about sockets and profilers would fill a
# class's screens. If a job hangs, see them: export TORCH_CPP_LOG_LEVEL=INFO.
export KINETO_LOG_LEVEL=6 TORCH_CPP_LOG_LEVEL=${TORCH_CPP_LOG_LEVEL:-ERROR}
# One thread per process: a process with a GPU needs no more, and one without stands for a GPU
# by using one core.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

if ! has_driver; then # keep freed memory for the next step: else exercise 8 is 20 % slower
    export MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=4000000000
fi

# set_gpus N [NODES]: set GPUS, the number of processes per node, to Slurm's number, else to
# the one in `GPUS=4 bash ...`, else to N. Without Slurm and with too few GPUs, use CPU cores.
# With NCCL_MULTI_RANK_GPU_ENABLE=1 processes share GPUs instead (docs/ONE_GPU.md).
set_gpus() {
    local sharing=${NCCL_MULTI_RANK_GPU_ENABLE:-0}
    if [[ $sharing == 1 ]]; then
        GPUS=${GPUS:-$1} # Slurm's number is of GPUs, not of the processes that share them
    else
        GPUS=${SLURM_GPUS_ON_NODE:-${GPUS:-$1}}
    fi
    if [[ ! $GPUS:${2:-1} =~ ^[1-9][0-9]*:[1-9][0-9]*$ ]]; then
        echo "Error: GPUS=$GPUS NODES=${2:-1}: these are numbers from 1 on" >&2
        return 2
    fi
    if [[ ! ${SLURM_JOB_ID:-} ]] && has_driver; then
        local here wanted=$((GPUS * ${2:-1}))
        here=$("${PYTHON[@]}" -c "import torch; print(torch.accelerator.device_count())")
        if ((here < wanted)) && [[ $here == 0 || $sharing != 1 ]]; then
            echo "GPUs here: $here, wanted: $wanted. This runs on CPU cores: add the small" \
                "options of the README" >&2
            ((here == 0)) || echo "To use GPUs, put NCCL_MULTI_RANK_GPU_ENABLE=1 in front:" \
                "processes then share them (docs/ONE_GPU.md); or GPUS=$here NODES=1" >&2
            export CUDA_VISIBLE_DEVICES=-1 HIP_VISIBLE_DEVICES=-1 # AMD's reads '' as all GPUs
        fi
    fi
}

# pick_gpus FIELDS: without Slurm, keep only these entries of CUDA_VISIBLE_DEVICES. They count
# from 1, as for `cut`: of the default 0,1,2,... 1-2 keeps GPUs 0 and 1. Processes that share
# GPUs keep all.
pick_gpus() {
    [[ ! ${SLURM_JOB_ID:-} && ${NCCL_MULTI_RANK_GPU_ENABLE:-0} != 1 ]] || return 0
    local all=${HIP_VISIBLE_DEVICES-${CUDA_VISIBLE_DEVICES-$(seq -s, 0 63)}}
    export CUDA_VISIBLE_DEVICES=$(cut --delimiter=, --fields="$1" <<< "$all")
    export HIP_VISIBLE_DEVICES=$CUDA_VISIBLE_DEVICES # PyTorch for AMD prefers this one
}
