# LUMI (CSC, Finland): AMD MI250X, ROCm, PyTorch in a Singularity container.
# Before sbatch: export SBATCH_ACCOUNT=project_... SBATCH_PARTITION=small-g
# For a class (docs/CLUSTER.md#for-a-class): edit the lines that you need, and remove their first #.
# export SBATCH_ACCOUNT=${SBATCH_ACCOUNT:-project_...}
# export SBATCH_PARTITION=${SBATCH_PARTITION:-small-g}
# export SBATCH_RESERVATION=${SBATCH_RESERVATION-NAME}
# export SBATCH_MEM_PER_GPU=${SBATCH_MEM_PER_GPU:-60G} # up to 64 cost no more; a node's /tmp is in memory, too
# export TORCH_HOME=${TORCH_HOME:-/scratch/project_.../torch}
# export DATADIR=${DATADIR:-/scratch/project_.../data}
course=$common/.. # or the teacher's clone
account=${SBATCH_ACCOUNT:-${SLURM_JOB_ACCOUNT:?run export SBATCH_ACCOUNT=project_...}}
images=/appl/local/laifs/containers
if [[ $framework == torch && -d $images ]]; then
    module use /appl/local/laifs/modules
    module load lumi-aif-singularity-bindings
    image=${SIF:-$images/lumi-multitorch-latest.sif}
    # Between nodes: since ROCm 7 the container finds the network, and NCCL_NET_GDR_LEVEL=PHB,
    # which older guides set, can hang (LUMI-AI-Guide, May and September 2026; not run here).
    export FI_MR_CACHE_MONITOR=userfaultfd
else # the older containers: TensorFlow is in no other
    module use /appl/local/containers/ai-modules
    module load singularity-AI-bindings
    images=/appl/local/containers/sif-images kind=${framework/#torch/pytorch}
    image=${SIF:-$(ls $images/lumi-$kind-rocm-*.sif | sort -V | tail -n 1)}
    # Between nodes: RCCL over the Slingshot network.
    export NCCL_SOCKET_IFNAME=hsn0,hsn1,hsn2,hsn3 NCCL_NET_GDR_LEVEL=PHB
fi
user=${USER:-$(id -un)} # a container or a cron job may not set USER
# What the container lacks: docs/PYTORCH.md#a-package-is-missing
python=$course/.venv-$site/bin/python # a link to a file inside the container
[[ $framework == torch && -L $python ]] || python=python
# Older containers keep their Python in a conda environment, which WITH_CONDA activates.
PYTHON=(singularity exec "$image" bash -c '$WITH_CONDA; exec "$0" "$@"' "$python")

# MIOpen's compiled kernels go to the node's own /tmp, because the shared disk is slow.
export MIOPEN_USER_DB_PATH=/tmp/$user-miopen MIOPEN_CUSTOM_CACHE_DIR=/tmp/$user-miopen
export DATADIR=${DATADIR:-/scratch/$account/$user/data}
