# Roihu (CSC, Finland; follows Puhti, closed since July 2026): NVIDIA GH200, software from modules.
# Log in to roihu-gpu.csc.fi, because the GPU nodes are Arm.
# Before sbatch: export SBATCH_ACCOUNT=project_... SBATCH_PARTITION=gpumedium
# CSC's own scripts give the type of the GPUs. If sbatch requires it: sbatch
# --gpus-per-node=gh200:2 run-2gpus.sh ..., in mnist_multigpu --gres=gpu:gh200:2.
# gpumedium allows up to 4 GPUs per job, gputest 15 minutes (--time=15), gpularge more GPUs on request.
# For a class (docs/CLUSTER.md#for-a-class): edit the lines that you need, and remove their first #.
# export SBATCH_ACCOUNT=${SBATCH_ACCOUNT:-project_...}
# export SBATCH_PARTITION=${SBATCH_PARTITION:-gpumedium}
# export SBATCH_RESERVATION=${SBATCH_RESERVATION-NAME}
# export TORCH_HOME=${TORCH_HOME:-/scratch/project_.../torch}
# export DATADIR=${DATADIR:-/scratch/project_.../data}
course=$common/.. # or the teacher's clone
account=${SBATCH_ACCOUNT:-${SLURM_JOB_ACCOUNT:?run export SBATCH_ACCOUNT=project_...}}
module purge
if [[ $framework == tensorflow ]]; then
    module load "${TENSORFLOW_MODULE:-python-tensorflow}" # 2.21 in August 2026
else
    module load "${PYTORCH_MODULE:-python-pytorch}" # 2.10 in August 2026
    venv=$course/.venv-$site # what the modules lack: docs/PYTORCH.md#a-package-is-missing
    [[ ! -f $venv/bin/activate ]] || source "$venv/bin/activate"
fi
PYTHON=(python3)
export DATADIR=${DATADIR:-/scratch/$account/${USER:-$(id -un)}/data}
