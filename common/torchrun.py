"""torchrun with short errors: a failed job ends with the failed rank's own error.

    python -m common.torchrun --standalone --nproc-per-node=2 SCRIPT.py [OPTIONS]

Plain `torchrun` works as well. It adds pages of text, and its status is always 1.
"""

import logging
import os
import signal
import sys
import time

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # read by the imports below
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousError
from torch.distributed.run import main

from common import device  # noqa: F401, refuses an old PyTorch

if os.environ["TORCH_CPP_LOG_LEVEL"] == "FATAL":  # ranks may print their errors
    os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"
# Ranks of one machine meet at 127.0.0.1: a laptop may not know its own host name.
if "--standalone" in sys.argv:
    at = sys.argv.index("--standalone")
    sys.argv[at : at + 1] = "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0"
if "--rdzv-endpoint=127.0.0.1:" in " ".join(sys.argv):
    os.environ.setdefault("PET_LOCAL_ADDR", "127.0.0.1")
logging.disable(logging.ERROR)
try:
    main()
except (RendezvousError, dist.DistNetworkError, dist.DistStoreError):
    # If the first node has failed, its error is printed, and srun ends this process.
    signal.signal(signal.SIGTERM, lambda *_: os._exit(1))
    time.sleep(5)
    sys.exit("Error: not all nodes have joined, or the first one has failed")
except SignalException as error:
    if error.sigval == signal.SIGINT:
        print("\nStopped by Ctrl-C", file=sys.stderr)
        sys.exit(130)
    # When one node fails, srun ends the others. The job gets the highest status.
    sys.exit(1)
except ChildFailedError as error:
    # A rank killed by a signal has a negative status. Those that torchrun terminated
    # have -15, the lowest, so the highest status belongs to the rank that failed.
    status, rank = max((f.exitcode, rank) for rank, f in error.failures.items())
    if status < 0:
        name = signal.Signals(-status).name
        why = " (usually out of memory)" if name == "SIGKILL" else ""
        print(f"Error: rank {rank} was ended by {name}{why}", file=sys.stderr)
        status = 128 - status
    sys.exit(status)
finally:  # torchrun's handler would raise while Python ends
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
