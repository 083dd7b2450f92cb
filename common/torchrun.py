"""torchrun, but a failed job ends with the words and status of the rank that failed.

    python -m common.torchrun --standalone --nproc-per-node=2 SCRIPT.py [OPTIONS]

torchrun itself adds pages of its own and always exits with status 1. This one also
says who waits where, and ends a job that has done no step for DDP_TIMEOUT seconds.
"""

import atexit
import linecache
import logging
import os
import re
import signal
import sys
import sysconfig
import threading
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # read by the imports below
from torch.distributed import DistNetworkError, DistStoreError, TCPStore
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousError
from torch.distributed.elastic.rendezvous.api import RendezvousTimeoutError
from torch.distributed.run import main

if os.environ["TORCH_CPP_LOG_LEVEL"] == "FATAL":  # of the ranks we want to hear more
    os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"
logging.disable(logging.ERROR)
# The processes meet where torchrun's option --local-addr says. Its default, the name
# that the host calls itself, may be of a network that leads nowhere.
node = os.environ.get("SLURMD_NODENAME", "")
address = "localhost" if "--standalone" in sys.argv else node
os.environ.setdefault("PET_LOCAL_ADDR", address)
# Code that a script calls: ours, Python's and of its packages.
OTHERS = os.path.dirname(__file__), *map(sysconfig.get_path, ("stdlib", "purelib"))


def say(text):
    """Print a line of its own, also where a bar is."""
    start = "\n" * sys.stderr.isatty()
    print(f"{start}{text}\n", end="", file=sys.stderr, flush=True)


def pass_on(number, frame):
    """Tell the ranks, too: Slurm signals the processes that it started itself."""
    with suppress(OSError), open("/proc/thread-self/children") as children:
        for rank in children.read().split():
            os.kill(int(rank), number)


def watch(ranks, limit):
    """Say where the processes of this node are, if none does a step for 10 s.

    ranks: a folder, in which each has a file RANK.PID since device.get_ranks(), and
    RunLog touches "steps" while it goes on. After limit seconds the job ends.
    """
    steps, before, still, clock, said = ranks / "steps", None, 0, 0, -60
    with suppress(FileNotFoundError):  # of the folder, when the job has ended
        while True:
            time.sleep(2)
            clock += 2
            now = steps.stat().st_mtime if steps.exists() else None
            still, before = (still + 2 if now and now == before else 0), now
            if still < limit and (still < 10 or clock - said < 60):
                continue
            places, said = "; ".join(where(ranks)), clock
            if still < limit:
                say(f"no step for {still} s: {places}")
                continue
            if "does not answer" not in places:
                time.sleep(5)  # another node's may, and then its launcher names it
            say(f"Error: no step for {still} s, the time limit: {places}")
            signal_all(ranks, signal.SIGCONT)  # one that is stopped could not end
            return os.kill(os.getpid(), signal.SIGTERM)


def signal_all(ranks, number):
    """Send a signal to the processes of these files, and forget those that ended."""
    for file in ranks.glob("*.*"):
        try:
            os.kill(int(file.suffix[1:]), number)
        except OSError:
            file.unlink(missing_ok=True)


def where(ranks):
    """Yield at which line of its script each process is."""
    for file in ranks.glob("*.*"):
        os.truncate(file, 0)
    signal_all(ranks, signal.SIGUSR2)  # they write their calls to the files
    time.sleep(0.5)
    for file in sorted(ranks.glob("*.*"), key=lambda file: int(file.stem)):
        calls = re.findall(r'"([^<].*)", line (\d+)', file.read_text())
        ours = [c for c in calls if not c[0].startswith(OTHERS)] or calls[-1:]
        answer = "does not answer"
        for name, line in ours[:1]:
            code = linecache.getline(name, int(line)).strip()
            answer = f"at {Path(name).name}:{line} `{code}`"
        yield f"rank {file.stem} {answer}"


def roll_call(nodes, seconds=10):
    """Say which of these nodes have not come by then; they may have no names."""
    here, missing = Path(folder.name), []
    time.sleep(2)  # mostly main() has looked up names: both at once crashed, once
    with suppress(RuntimeError):  # nobody there, or no more: main() tells why
        if nodes:
            end = re.search(r"--rdzv-endpoint=(\S+):(\d+)", " ".join(sys.argv))
            store = TCPStore(end[1], int(end[2]), timeout=timedelta(seconds=60))
            store.set(f"here/{node}", "")
        time.sleep(seconds - 2)
        missing = [name for name in nodes if not store.check([f"here/{name}"])]
    if missing and node == nodes[0]:
        who, first = ", ".join(missing), missing[0]
        ask = f"srun --overlap --nodelist={first} hostname"
        say(f"still waiting for {who} after {seconds} s: does `{ask}` answer?")
    elif not nodes and not any(here.glob("logs/*/attempt*")):  # no rank is started
        say(f"still waiting for other nodes after {seconds} s: are they started?")


signal.signal(signal.SIGUSR1, pass_on)  # else it would end this process
atexit.register(signal.signal, signal.SIGUSR1, signal.SIG_IGN)
# When a node fails, srun ends the others. They say nothing and leave with the lowest
# status, as the job gets the highest.
signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
folder = TemporaryDirectory(prefix="torchrun-")  # until this process ends
os.environ["PET_LOG_DIR"] = f"{folder.name}/logs"  # else torchrun leaves one behind
os.environ["RANKS_TELL"] = folder.name
limit = os.environ.get("DDP_TIMEOUT") or "540"  # env.sh has looked at it
watched = Path(folder.name), max(10, int(limit))
threading.Thread(target=watch, args=watched, daemon=True).start()
if "--standalone" not in sys.argv:
    nodes = os.environ.get("JOB_NODES", "").split()  # of common/nodes.sh
    threading.Thread(target=roll_call, args=[nodes], daemon=True).start()
try:
    try:
        main()
    except (RendezvousTimeoutError, DistStoreError):
        sys.exit("Error: not all nodes have come")
    except (RendezvousError, DistNetworkError):
        time.sleep(5)  # if the first node has failed, it has told why
        sys.exit("Error: no connection to the first node's torchrun; has it failed?")
except SignalException as error:  # SIGTERM or Ctrl-C, while main() runs and after
    if error.sigval == signal.SIGINT:
        say("Stopped by Ctrl-C")
    sys.exit(130 if error.sigval == signal.SIGINT else 1)
except ChildFailedError as error:
    # A rank that a signal ended has a negative status; for those that torchrun ended
    # it is -15, the lowest. So the highest one belongs to the rank to blame.
    failures = {f.exitcode: rank for rank, f in error.failures.items()}
    status = max(failures)
    if status < 0:
        name = signal.Signals(-status).name
        why = " (mostly no memory is left)" * (name == "SIGKILL")
        say(f"Error: rank {failures[status]} was ended by {name}{why}")
    sys.exit(status if status > 0 else 128 - status)
