# LUMI (CSC, Finland): AMD MI250X, ROCm, PyTorch in a Singularity container.
# Before sbatch: export SBATCH_ACCOUNT=project_... SBATCH_PARTITION=small-g
module use /appl/local/containers/ai-modules
module load singularity-AI-bindings
kind=$framework
[[ $framework != torch ]] || kind=pytorch
image=${SIF:-$(ls /appl/local/containers/sif-images/lumi-$kind-rocm-*.sif | sort -V | tail -n 1)}
# The container keeps its Python in a conda environment, which WITH_CONDA activates.
PYTHON=(singularity exec "$image" bash -c '$WITH_CONDA; exec python "$@"' python)

# The kernels that MIOpen compiles: on the node's own disk, for the shared one is slow.
export MIOPEN_USER_DB_PATH=/tmp/$USER-miopen MIOPEN_CUSTOM_CACHE_DIR=/tmp/$USER-miopen
# RCCL between nodes: over the Slingshot network.
export NCCL_SOCKET_IFNAME=hsn0,hsn1,hsn2,hsn3 NCCL_NET_GDR_LEVEL=PHB
export DATADIR=${DATADIR:-/scratch/${SBATCH_ACCOUNT:-$SLURM_JOB_ACCOUNT}/$USER/data}
