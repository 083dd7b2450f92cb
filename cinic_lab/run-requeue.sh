#!/bin/bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=7
#SBATCH --gpus-per-node=1
#SBATCH --time=00:20:00
#SBATCH --requeue --open-mode=append --signal=B:USR1@120

# Like run-2nodes.sh; after SIGUSR1 the ranks end their epoch, and the job is requeued.
#     sbatch run-requeue.sh cinic_requeue.py [OPTIONS]      (or bash, and kill -USR1)

set -euo pipefail
[[ ${SLURM_JOB_ID:-} ]] || CDPATH= cd "$(dirname "$0")" # a job starts where it was submitted
: "${1:?name a Python script}"
export STOP_FILE=logs/stop-${SLURM_JOB_ID:-$$}-${SLURM_RESTART_COUNT:-0}
trap 'trap "" USR1; mkdir -p logs; touch "$STOP_FILE"' USR1 # the ranks look for this file
source common/env.sh
set_gpus 1 2 # without Slurm: two nodes on this machine, one process on each
(source common/launch_nodes.sh "$1" $small "${@:2}") & launch=$! status=0
trap 'kill $launch 2> /dev/null || true; rm -f "$STOP_FILE"' EXIT
wait $launch || wait $launch || status=$? # SIGUSR1 ends the first wait, but not the ranks
# If all epochs are done, or nothing asked to stop, the job ends with the ranks' status.
[[ $status == 0 || ! -f $STOP_FILE || ! ${SLURM_JOB_ID:-} ]] || scontrol requeue "$SLURM_JOB_ID"
exit $status
