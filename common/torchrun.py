"""PyTorch's torchrun without its error report, since the failed rank prints why.

    python -m common.torchrun --standalone --nproc-per-node=2 SCRIPT.py [OPTIONS]

The exit status is the failed rank's. Plain `torchrun` works as well.
"""

import logging
import os
import sys

from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main

if __name__ == "__main__":
    logging.disable(logging.ERROR)
    try:
        main()
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        status = failure.exitcode
        if status < 0:  # a signal ended it before it could print an error
            print(f"Error: rank {rank}: {failure.message}", file=sys.stderr)
            status = 128 - status  # as a shell does
        os._exit(status)  # at once: srun's SIGTERM would change the status
    except SignalException:  # Ctrl-C, or srun, because another node failed
        os._exit(1)
