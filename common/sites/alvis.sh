# Is PyTorch-bundle older than 2.7? export PYTORCH_MODULE=PyTorch-bundle/... (`module spider
# PyTorch-bundle`), or `make venv` and export SITE=venv. The course's jobs load 2.1.2.
# Alvis (C3SE, Sweden): NVIDIA T4 to A100, software from modules. It was to close on 31 August 2026,
# except for Chalmers (C3SE's page of May). For other clusters with such modules, copy this file.
# Before sbatch: export SBATCH_ACCOUNT=NAISS...
# Alvis requires the type of the GPUs, so give it with the number: sbatch --gpus-per-node=A100:2
# run-2gpus.sh ..., and in mnist_multigpu --gres=gpu:A100:2. (SBATCH_GPUS_PER_NODE would set
# the same number for all scripts.)
# For a class (docs/CLUSTER.md#for-a-class): edit the lines that you need, and remove their first #.
# export SBATCH_ACCOUNT=${SBATCH_ACCOUNT:-NAISS...}
# export SBATCH_RESERVATION=${SBATCH_RESERVATION-NAME}
# export TORCH_HOME=${TORCH_HOME:-/mimer/NOBACKUP/groups/NAISS.../torch}
course=$common/.. # or the teacher's clone
account=${SBATCH_ACCOUNT:-${SLURM_JOB_ACCOUNT:?run export SBATCH_ACCOUNT=NAISS...}}
module purge
if [[ $framework == tensorflow ]]; then
    module load "${TENSORFLOW_MODULE:-TensorFlow}" # 2.16 or later, with CUDA: `module spider TensorFlow`
else
    module load "${PYTORCH_MODULE:-PyTorch-bundle}" # 2.7 or later
    # Plots and notebooks, in versions for the same toolchain: `module spider matplotlib`
    # module load matplotlib/... JupyterLab/...
    venv=$course/.venv-$site # what the modules lack: docs/PYTORCH.md#a-package-is-missing
    [[ ! -f $venv/bin/activate ]] || source "$venv/bin/activate"
fi
PYTHON=(python3)
export DATADIR=${DATADIR:-/mimer/NOBACKUP/groups/$account/data}
