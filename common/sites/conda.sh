# A cluster with conda: SITE=conda. Make the environment once, on a login node:
#     conda create -n multigpu python=3.12 && conda activate multigpu
#     pip install -r requirements.txt
# For TensorFlow make another one, multigpu-tensorflow, with 'tensorflow[and-cuda]'.
# For a class (docs/CLUSTER.md#for-a-class): edit the lines that you need, and remove their first #.
# export SBATCH_ACCOUNT=${SBATCH_ACCOUNT:-...}
# export SBATCH_PARTITION=${SBATCH_PARTITION:-gpu}
# export SBATCH_RESERVATION=${SBATCH_RESERVATION-NAME}
# export SBATCH_MEM_PER_GPU=${SBATCH_MEM_PER_GPU:-16G}
# export TORCH_HOME=${TORCH_HOME:-/projects/course/torch}
# export DATADIR=${DATADIR:-/projects/course/data}
# export CONDA_ENVIRONMENT=/projects/course/env # conda create --prefix /projects/course/env
module load Miniforge3 2>/dev/null || true # the name differs: `module avail forge conda`
command -v conda > /dev/null || { echo "Error: no conda: load its module in $BASH_SOURCE" >&2; return 2; }
eval "$(conda shell.bash hook)"
environment=${CONDA_ENVIRONMENT:-multigpu}
[[ $framework == torch ]] || environment=$environment-$framework
conda activate "$environment"
export DATADIR=${DATADIR:-/scratch/${USER:-$(id -un)}/data}
