# Sets PYTHON to a Python with PyTorch, and the environment variables that runs need. Every run
# script sources this; in your terminal it also defines `python` and, without Slurm, `sbatch`.
# common/sites/NAME.sh chooses the Python. NAME is $SITE or, if that is not set, the name of the
# Slurm cluster, or else venv. FRAMEWORK=tensorflow selects a Python with TensorFlow.
[ -n "${BASH_VERSION:-}" ] || { echo "Error: this needs bash: run \`bash\` first" >&2; return 2; }

common=$(CDPATH= cd -P "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# In a job, Slurm sets the cluster's name; on a login node, read it from Slurm's configuration.
name='s/^ *ClusterName *= *\([^ #]*\).*/\1/Ip'
cluster=$(sed -n "$name" "${SLURM_CONF:-/etc/slurm/slurm.conf}" 2> /dev/null || true)
cluster=${SLURM_CLUSTER_NAME:-$cluster}
site=${SITE:-${cluster,,}} # file names are in lower case
[[ ${SITE:-} || -f $common/sites/$site.sh ]] || site=venv

# True if there is a GPU driver and no variable hides the GPUs. Asking PyTorch would take seconds.
has_driver() {
    local named=${ROCR_VISIBLE_DEVICES-${HIP_VISIBLE_DEVICES-${CUDA_VISIBLE_DEVICES-all}}}
    [[ ! $named =~ ^(-1)?$ && $(compgen -G '/dev/*') =~ /dev/(nvidia[0-9]|kfd|dxg) ]]
}

PYTHON=(python3) framework=${FRAMEWORK:-torch}
source "$common/sites/$site.sh" || return 2
# Finding a package is faster than importing it. A namespace package, which may be just a folder
# of the same name, has the origin None.
find="import sys, importlib.util as u; sys.exit(not u.find_spec('$framework').origin)"
if ! "${PYTHON[@]}" -c "$find" 2> /dev/null; then
    target=venv
    [[ $framework == torch ]] || target=venv-$framework
    echo "Error: no $framework for ${PYTHON[*]}: run \`make $target\` in" \
        "$(dirname "$common"), or see $common/sites/$site.sh" >&2
    return 2
fi
if [[ $- == *i* ]]; then # not in scripts: after `python &`, $! would be a subshell's PID
    python() { command "${PYTHON[@]}" "$@"; }
    type -P sbatch > /dev/null || source "$common/sbatch.sh"
fi

export PYTHONUNBUFFERED=1 # output appears in the job's file at once
# PyTorch's C++ code prints only errors, because its warnings about sockets and profilers would
# fill the screen. To see them when a job hangs: export TORCH_CPP_LOG_LEVEL=INFO.
export KINETO_LOG_LEVEL=6 TORCH_CPP_LOG_LEVEL=${TORCH_CPP_LOG_LEVEL:-ERROR}
# One thread per process: a process with a GPU needs no more, and without GPUs, one core stands
# in for a GPU.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

# On CPU cores, `small` is set to the options in the folder's small.txt, because a laptop would
# train for hours without them. The run script puts them before the student's options. If $1 is a
# script that does not mention small.txt, `small` stays empty.
small= script=${1:--}
use_cpu_cores() {
    # Keep freed memory for the next step. Without this, exercise 8 is 20 % slower.
    export MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=4000000000
    if [[ -f small.txt && ${SMALL:-} != 0 ]] &&
        { [[ $script == -* ]] || grep -qs small.txt "$script"; }; then
        small=$(< small.txt)
        echo "No GPU here: adding $small (small.txt; SMALL=0 leaves them out)" >&2
    fi
}
[[ $- == *i* ]] || has_driver || use_cpu_cores

# set_gpus N [NODES]: set GPUS, the number of processes per node, to Slurm's number of GPUs, or
# else to the one in `GPUS=4 bash ...`, or else to N. NODES is set in the same way. Without Slurm
# and with too few GPUs, use CPU cores. With NCCL_MULTI_RANK_GPU_ENABLE=1 processes share GPUs
# instead (docs/ONE_GPU.md), so GPUS is then not Slurm's number of GPUs.
set_gpus() {
    local here sharing=${NCCL_MULTI_RANK_GPU_ENABLE:-0}
    NODES=${SLURM_NNODES:-${NODES:-${2:-1}}}
    [[ $sharing != 1 ]] && GPUS=${SLURM_GPUS_ON_NODE:-${GPUS:-$1}} || GPUS=${GPUS:-$1}
    if [[ ! ${SLURM_JOB_ID:-} ]] && has_driver; then
        here=$("${PYTHON[@]}" -c "import torch; print(torch.accelerator.device_count())")
        if ((here == 0 || (here < GPUS * NODES && sharing != 1))); then
            echo "GPUs here: $here, wanted: $((GPUS * NODES)). This runs on CPU cores." >&2
            ((here == 0)) || echo "To use GPUs, put NCCL_MULTI_RANK_GPU_ENABLE=1 in front:" \
                "processes then share them (docs/ONE_GPU.md)" >&2
            export CUDA_VISIBLE_DEVICES=-1 HIP_VISIBLE_DEVICES=-1 # for AMD, '' means all GPUs
            use_cpu_cores
        fi
    fi
}
