# A cluster with conda: SITE=conda. Make the environment once, on a login node:
#     conda create -n multigpu python=3.12 && conda activate multigpu
#     pip install -r requirements.txt
# For TensorFlow make another one, multigpu-tensorflow, with 'tensorflow[and-cuda]'.
module load Miniforge3 2>/dev/null || true # the name differs: `module avail forge conda`
eval "$(conda shell.bash hook)"
environment=${CONDA_ENVIRONMENT:-multigpu}
[[ $framework == torch ]] || environment=$environment-$framework
conda activate "$environment"
export DATADIR=${DATADIR:-/scratch/$USER/data}
