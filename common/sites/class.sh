# A class: the teacher makes the environment and fetches the data once; all others read them.
# Copy this to NAME.sh and edit it: docs/CLUSTER.md#for-a-class
course=/projects/course/multigpu # the teacher's clone of this repository
# module load Python/... # if the python3 of the teacher's `make venv` came from a module
venv=$course/.venv
[[ $framework == torch ]] || venv=$venv-$framework
[[ ! -f $venv/bin/activate ]] || source "$venv/bin/activate"
export DATADIR=${DATADIR:-$course/data}
export TORCH_HOME=${TORCH_HOME:-$course/data/torch} # exercise 8: VGG16's weights
# sbatch reads these, so nobody types them. A student's setting overrides them. Edit the lines
# that your centre requires, and remove their first #.
# export SBATCH_ACCOUNT=${SBATCH_ACCOUNT:-project_1234}
# export SBATCH_PARTITION=${SBATCH_PARTITION:-gpu}
# export SBATCH_RESERVATION=${SBATCH_RESERVATION-monday} # for none: export SBATCH_RESERVATION=
if [[ ! ${SBATCH_MEM_PER_NODE:-${SBATCH_MEM_PER_CPU:-}} ]]; then # Slurm accepts only one of these
    export SBATCH_MEM_PER_GPU=${SBATCH_MEM_PER_GPU:-16G} # of the node's memory, for each GPU
fi
