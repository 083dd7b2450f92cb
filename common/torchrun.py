"""PyTorch's torchrun without its report: a rank that fails has said why.

    python -m common.torchrun --standalone --nproc-per-node=2 SCRIPT.py [OPTIONS]

The status is that of the rank that failed. Plain `torchrun` works as well.
"""

import logging
import sys

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main

if __name__ == "__main__":
    logging.disable(logging.ERROR)
    try:
        main()
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode < 0:  # a signal ended it, so it said nothing
            print(f"Error: rank {rank}: {failure.message}", file=sys.stderr)
            sys.exit(128 - failure.exitcode)  # as a shell does
        sys.exit(failure.exitcode)
    except SignalException:
        sys.exit(1)  # srun returns the highest: that of the node that failed
