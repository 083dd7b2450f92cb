# Alvis (C3SE, Sweden): NVIDIA T4 to A100, software from modules.
# Before sbatch: export SBATCH_ACCOUNT=NAISS... SBATCH_GPUS_PER_NODE=A100:2
module purge
if [[ $framework == tensorflow ]]; then
    module load "${TENSORFLOW_MODULE:-TensorFlow}" # 2.16 or later, with CUDA: `module spider TensorFlow`
else
    module load "${PYTORCH_MODULE:-PyTorch-bundle}" # 2.8 or later: `module spider PyTorch-bundle`
fi
PYTHON=(python3)
export DATADIR=${DATADIR:-/mimer/NOBACKUP/groups/${SBATCH_ACCOUNT:-$SLURM_JOB_ACCOUNT}/data}
