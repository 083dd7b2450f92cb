"""Functions for a job that Slurm stops and starts again."""

import os
import sys

import torch
import torch.distributed as dist

from random_states import gather_from_ranks
from state import LATEST

EXIT_REQUEUE = 85  # exit status of a run that stopped early, to be requeued


def find_checkpoint(folder):
    """Return the newest checkpoint's path if Slurm restarted this job, else None.

    folder: this run's. Its name begins with the number of GPUs, the script and the
    job, and so do the folders of the job's earlier runs.
    """
    if os.environ.get("SLURM_RESTART_COUNT", "0") == "0":
        return None
    job = os.environ["SLURM_JOB_ID"]
    begin = folder.name.partition(f"-{job}-")[0]
    # Strings, because the path becomes an option and is saved as JSON.
    files = map(str, folder.parent.glob(f"{begin}-{job}-*/{LATEST}"))
    newest = max(files, key=os.path.getmtime, default=None)
    return gather_from_ranks(newest)[0]


def stop_requested(device):
    """Return 1.0 on the device if run-requeue.sh created STOP_FILE, else 0.0."""
    requested = os.path.exists(os.environ.get("STOP_FILE", ""))
    return torch.tensor(float(requested), device=device)


def exit_early(log, epoch):
    """Exit with EXIT_REQUEUE, the status of a run that can be resumed."""
    log.print(f"Stopped after epoch {epoch}: use --resume {LATEST}")
    dist.barrier()  # torchrun ends all ranks when one exits
    dist.destroy_process_group()
    sys.exit(EXIT_REQUEUE)
