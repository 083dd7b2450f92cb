#!/bin/bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=7
#SBATCH --gpus-per-node=1
#SBATCH --time=00:20:00
#SBATCH --requeue --open-mode=append --signal=B:USR1@120

# Like run-2nodes.sh; on SIGUSR1 it ends the epoch, saves, and requeues the job.
#     sbatch run-requeue.sh cinic_requeue.py [OPTIONS]      (or bash, and kill -USR1)

set -euo pipefail
[[ ${SLURM_JOB_ID:-} ]] || CDPATH= cd "$(dirname "$0")" # a job starts where it was submitted
[[ ${1:--} == -* ]] && echo "Error: name a script: sbatch run-requeue.sh SCRIPT.py" >&2 && exit 2
export STOP_FILE=logs/stop-${SLURM_JOB_ID:-$$}-${SLURM_RESTART_COUNT:-0}
trap 'mkdir -p logs && touch "$STOP_FILE"' USR1 # the ranks check for it after each epoch
source common/env.sh
set_gpus 1 2 # without Slurm: two nodes on this machine, one process on each
(source common/launch_nodes.sh "$1" $small "${@:2}") & launch=$!
trap 'rm -f "$STOP_FILE"; kill $(jobs -p) 2> /dev/null || true' EXIT
status=0
wait $launch || status=$? # SIGUSR1 interrupts wait, but not the ranks
if [[ $status == 0 || ! -f $STOP_FILE ]]; then
    exit $status # all epochs are done, or the script failed
fi
# tail waits until the ranks have ended their epoch and saved, or for GRACE_SECONDS. If it was
# the last epoch, their status is 0, and nothing is left to requeue.
if timeout "${GRACE_SECONDS:-90}" tail --pid=$launch -f /dev/null && wait $launch; then
    exit
fi
if [[ ${SLURM_JOB_ID:-} ]] && ((${SLURM_RESTART_COUNT:-0} < ${MAX_REQUEUES:-20})); then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit 85
