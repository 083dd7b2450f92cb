"""torchrun, but a failed job ends with the words and status of the rank that failed.

    python -m common.torchrun --standalone --nproc-per-node=2 SCRIPT.py [OPTIONS]

torchrun itself adds pages of its own and always exits with status 1.
"""

import logging
import os
import signal
import sys
import time

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # read by the imports below
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousError
from torch.distributed.run import main

logging.disable(logging.ERROR)
# When a node fails, srun ends the others. They say nothing and leave with the lowest
# status, as the job gets the highest.
signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
try:
    try:
        main()
    except RendezvousError:
        time.sleep(5)  # if the first node has failed, it has told why
        sys.exit("Error: no connection to the first node's torchrun; has it failed?")
except SignalException:  # SIGTERM, while main() runs and after
    sys.exit(1)
except ChildFailedError as error:
    # A rank that a signal ended has a negative status; for those that torchrun ended
    # it is -15, the lowest. So the highest one belongs to the rank to blame.
    failures = {f.exitcode: rank for rank, f in error.failures.items()}
    status = max(failures)
    if status < 0:
        name = signal.Signals(-status).name
        print(f"Error: rank {failures[status]} was ended by {name}", file=sys.stderr)
    sys.exit(status if status > 0 else 128 - status)
