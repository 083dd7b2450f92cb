"""torchrun, but a failed job ends with the words and status of the rank that failed.

    python -m common.torchrun --standalone --nproc-per-node=2 SCRIPT.py [OPTIONS]

torchrun itself adds pages of its own and always exits with status 1.
"""

import logging
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from datetime import timedelta

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # read by the imports below
from torch.distributed import TCPStore
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousError
from torch.distributed.elastic.rendezvous.api import RendezvousTimeoutError
from torch.distributed.run import main

logging.disable(logging.ERROR)
# The processes meet where torchrun's option --local-addr says. Its default, the name
# that the host calls itself, may be of a network that leads nowhere.
node = os.environ.get("SLURMD_NODENAME", "")
address = "localhost" if "--standalone" in sys.argv else node
os.environ.setdefault("PET_LOCAL_ADDR", address)


def pass_on(number, frame):
    """Tell the ranks, too: Slurm signals the processes that it started itself."""
    with suppress(OSError), open("/proc/thread-self/children") as children:
        for rank in children.read().split():
            os.kill(int(rank), number)


def roll_call(nodes, seconds=60):
    """On the first of these nodes, say which of the others have not come by then."""
    (endpoint,) = [word for word in sys.argv if word.startswith("--rdzv-endpoint=")]
    host, port = endpoint.partition("=")[2].split(":")
    try:
        store = TCPStore(host, int(port), timeout=timedelta(seconds=seconds))
        store.set(f"here/{node}", "")
        time.sleep(seconds)
        missing = [name for name in nodes if not store.check([f"here/{name}"])]
    except RuntimeError:  # nobody there, or no more: main() tells why
        return
    if missing and node == nodes[0]:
        who, first = ", ".join(missing), missing[0]
        ask = f"srun --overlap --nodelist={first} hostname"
        text = f"still waiting for {who} after {seconds} s: does `{ask}` answer?"
        print(text, file=sys.stderr)


nodes = os.environ.get("JOB_NODES")  # of common/nodes.sh
if nodes and "--standalone" not in sys.argv:
    threading.Thread(target=roll_call, args=[nodes.split()], daemon=True).start()
signal.signal(signal.SIGUSR1, pass_on)  # else it would end this process
# When a node fails, srun ends the others. They say nothing and leave with the lowest
# status, as the job gets the highest.
signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
try:
    try:
        main()
    except RendezvousTimeoutError:
        sys.exit("Error: not all nodes have come")
    except RendezvousError:
        time.sleep(5)  # if the first node has failed, it has told why
        sys.exit("Error: no connection to the first node's torchrun; has it failed?")
except SignalException as error:  # SIGTERM or Ctrl-C, while main() runs and after
    if error.sigval == signal.SIGINT:
        print("\nStopped by Ctrl-C", file=sys.stderr)
    sys.exit(130 if error.sigval == signal.SIGINT else 1)
except ChildFailedError as error:
    # A rank that a signal ended has a negative status; for those that torchrun ended
    # it is -15, the lowest. So the highest one belongs to the rank to blame.
    failures = {f.exitcode: rank for rank, f in error.failures.items()}
    status = max(failures)
    if status < 0:
        name = signal.Signals(-status).name
        print(f"Error: rank {failures[status]} was ended by {name}", file=sys.stderr)
    sys.exit(status if status > 0 else 128 - status)
