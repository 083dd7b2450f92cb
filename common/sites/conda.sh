# A cluster with conda: SITE=conda. Make the environment once, on a login node:
#     conda create -n multigpu python=3.12 && conda activate multigpu
#     pip install -r requirements.txt
module load Miniforge3 2>/dev/null || true # the name differs: `module avail forge conda`
eval "$(conda shell.bash hook)"
conda activate "${CONDA_ENVIRONMENT:-multigpu}"
export DATADIR=${DATADIR:-/scratch/$USER/data}
