#!/bin/bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=7
#SBATCH --gpus-per-node=1
#SBATCH --time=02:00:00
#SBATCH --requeue                 # the job may start again, under its number
#SBATCH --open-mode=append        # and goes on writing the same slurm-JOBID.out
#SBATCH --signal=B:USR1@120       # 120 s before the end tell this script, not its steps

# As run-2nodes.sh, but a job that is stopped saves, and comes back.
#     sbatch run-requeue.sh cinic_requeue.py [OPTIONS]
#     bash run-requeue.sh cinic_requeue.py [OPTIONS]     without Slurm: kill -USR1 stops it

set -euo pipefail
[[ ${SLURM_JOB_ID:-} ]] || CDPATH= cd "$(dirname "$0")" # a job is where it was submitted
[[ -f cinic.py ]] || { echo "Error: type cd cinic_lab first" >&2; exit 2; }
[[ -d common ]] || { echo "Error: type rm common; ln -s ../common common" >&2; exit 2; }
source common/env.sh
need_script run-requeue.sh "$@"

MOST=${MOST:-20} # or a script that never gets anywhere would come back for ever
(source common/nodes.sh) & launch=$! # while bash waits for it, it can handle signals
trap 'kill $launch 2> /dev/null || true' EXIT
trap 'printf "\nStopped by Ctrl-C\n" >&2; exit 130' INT
# To srun, or to the two launchers; common.torchrun passes it on to the ranks.
told=0
pass_on() {
    told=1
    if [[ ${SLURM_JOB_ID:-} ]]; then kill -USR1 $launch; else pkill -USR1 -P $launch; fi || true
}
trap pass_on USR1
while kill -0 $launch 2> /dev/null; do wait $launch || true; done # a signal ends wait, too
status=0
wait $launch || status=$?
# 85: it has saved. Once told, a signal may end it, too: USR1 if it had only begun, or SIGTERM
# of srun, which ends one node when the other has left.
((status == 85 || told && status)) || exit $status
if [[ ${SLURM_JOB_ID:-} ]] && ((${SLURM_RESTART_COUNT:-0} < MOST)); then
    exec scontrol requeue "$SLURM_JOB_ID"
fi
echo "To go on, type this again, with --resume checkpoint.pth.tar"
exit $status
