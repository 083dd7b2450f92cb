"""torchrun, but a failed job ends with the words and status of the rank that failed.

    python -m common.torchrun --standalone --nproc-per-node=2 SCRIPT.py [OPTIONS]

Plain `torchrun` works as well. It adds pages of its own, and its status is always 1.
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

from common import device  # noqa: F401, it refuses an old PyTorch

if os.environ["TORCH_CPP_LOG_LEVEL"] == "FATAL":  # of the ranks we want to hear more
    os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"
# Ranks of one machine meet at its own address: names may lead nowhere on a laptop.
if "--standalone" in sys.argv:
    at = sys.argv.index("--standalone")
    sys.argv[at : at + 1] = "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0"
if "--rdzv-endpoint=127.0.0.1:" in " ".join(sys.argv):
    os.environ.setdefault("PET_LOCAL_ADDR", "127.0.0.1")
logging.disable(logging.ERROR)
try:
    main()
except (RendezvousError, dist.DistNetworkError, dist.DistStoreError):
    # If the first node has failed, it says why; meanwhile srun ends this process.
    signal.signal(signal.SIGTERM, lambda *_: os._exit(1))
    time.sleep(5)
    sys.exit("Error: not all nodes have joined, or the first one has failed")
except SignalException as error:
    if error.sigval == signal.SIGINT:
        print("\nStopped by Ctrl-C", file=sys.stderr)
        sys.exit(130)
    # When a node has failed, srun ends the others: the job gets the highest status.
    sys.exit(1)
except ChildFailedError as error:
    # A rank that a signal ended has a negative status; for those that torchrun ended
    # it is -15, the lowest. So the highest one belongs to the rank to blame.
    status, rank = max((f.exitcode, rank) for rank, f in error.failures.items())
    if status < 0:
        name = signal.Signals(-status).name
        why = " (usually out of memory)" if name == "SIGKILL" else ""
        print(f"Error: rank {rank} was ended by {name}{why}", file=sys.stderr)
        status = 128 - status
    sys.exit(status)
finally:  # torchrun's handler would raise while Python ends
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
