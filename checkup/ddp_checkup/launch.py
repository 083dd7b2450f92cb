"""Starts ranks for -n, and finds this process's rank under another launcher.

This module does not import PyTorch, which would delay the launcher by seconds.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from collections import namedtuple

INTERRUPTED = 130  # the exit status after Ctrl-C, as shells report it
RUN_ID = "TORCHELASTIC_RUN_ID"  # torchrun sets it, and so do we
OF_A_RANK = "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"
# Launchers' variables for a process's rank, its rank on this node, and the number
# of all ranks
OPEN_MPI = (
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "OMPI_COMM_WORLD_SIZE",
)
MPICH = "PMI_RANK", "MPI_LOCALRANKID", "PMI_SIZE"
# A batch script is no rank: Slurm sets all but SLURM_STEP_NUM_TASKS for it, too.
SLURM_STEP = "SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NUM_TASKS"
SLURM = "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS"
NUMBERS = {*OF_A_RANK, "LOCAL_RANK", *OPEN_MPI, *SLURM}  # variables that -n sets

# A rank, and the address at which rank 0 opens the store for all ranks
Place = namedtuple("Place", "rank world_size host port")


def is_launched():
    """Return whether torchrun, or -n, has started this process."""
    return RUN_ID in os.environ


def find_place():
    """Return this process's Place, or None if no launcher has started it.

    A ValueError says what is wrong with the launcher's variables.
    """
    env = os.environ
    if "RANK" in env:
        check_rank()
        host, port = env["MASTER_ADDR"], int(env["MASTER_PORT"])
        return Place(int(env["RANK"]), int(env["WORLD_SIZE"]), host, port)
    for rank, _, size in (OPEN_MPI, MPICH, SLURM_STEP):
        if rank in env and int(env.get(size, 1)) > 1:
            nodes = env.get("SLURM_JOB_NODELIST", "")
            if rank in SLURM_STEP:  # mpirun's ranks are in steps of single nodes
                nodes = env.get("SLURM_STEP_NODELIST", nodes)
            place = find_host(nodes), find_port()
            return Place(int(env[rank]), int(env[size]), *place)
    return None


def check_rank():
    """Raise a ValueError unless torchrun's variables are those of several ranks."""
    for name in OF_A_RANK:
        value = os.environ.get(name)
        if not value:
            text = f"RANK is set, but {name} is not"
            raise ValueError(f"{text}: add -n 2, or run `unset RANK`")
        if name != "MASTER_ADDR" and not value.isdigit():
            raise ValueError(f"{name} is no number; run `unset {name}`")
    if os.environ["WORLD_SIZE"] in ("0", "1"):
        text = "WORLD_SIZE is 1, and the checkup needs two ranks: use -n 2 without "
        raise ValueError(f"{text}torchrun, or GPUS=2 before a run script's command")


def find_host(nodes):
    """Return the host of rank 0: MASTER_ADDR, Slurm's first node, or this one.

    nodes: Slurm's list, such as node[1-2]; "" without Slurm.
    """
    host = os.environ.get("MASTER_ADDR")
    if host or not {*"[,"} & {*nodes}:  # there is one node
        return host or "127.0.0.1"
    try:
        command = ["scontrol", "show", "hostnames", nodes]
        return subprocess.check_output(command, text=True).split()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        text = "cannot find the host of rank 0: set MASTER_ADDR to its name"
        raise ValueError(text) from None


def find_port():
    """Return a port that all ranks of a job derive, and no other job does.

    The port lies below those that the system gives to connections.
    """
    env = os.environ
    if env.get("MASTER_PORT"):
        return int(env["MASTER_PORT"])
    # Without Slurm, mpirun is the parent of all ranks, which are on one node.
    job = env.get("SLURM_JOB_ID", os.getppid())
    return 10_000 + int(job) % 20_000


def start_ranks(ranks):
    """Start this command once per rank, on this machine; return the exit status."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)  # as Ctrl-C
    with socket.socket() as bound:
        # No other program gets the port before rank 0 listens there.
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(("127.0.0.1", 0))
        port = bound.getsockname()[1]
        processes = []
        try:
            for rank in range(ranks):
                env = rank_environment(rank, ranks, port)
                processes.append(subprocess.Popen(own_command(), env=env))
            return wait_for_ranks(processes)
        except KeyboardInterrupt:
            end_ranks(processes, signal.SIGINT)
            print("Stopped.", file=sys.stderr)
            return INTERRUPTED
        finally:
            for process in processes:
                process.kill()


def own_command():
    folder = os.path.dirname(os.path.dirname(__file__))
    installed = not os.path.exists(f"{folder}/__main__.py")
    program = ["-m", "ddp_checkup"] if installed else [folder]
    return [sys.executable, "-u", *program, *sys.argv[1:]]


def rank_environment(rank, ranks, port):
    """Return the environment of a rank: torchrun's variables, Slurm's and MPI's."""
    env = {"OMP_NUM_THREADS": "1", **os.environ, "DDP_CHECKUP": "1"}
    env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), RUN_ID: "checkup"}
    env |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank)}
    env |= {
        "LOCAL_WORLD_SIZE": str(ranks),
        "GROUP_RANK": "0",
        "ROLE_NAME": "default",
    }
    env |= {"ROLE_RANK": str(rank), "ROLE_WORLD_SIZE": str(ranks)}
    env |= {"GROUP_WORLD_SIZE": "1", "TORCHELASTIC_RESTART_COUNT": "0"}
    env |= {"TORCHELASTIC_MAX_RESTARTS": "0"}
    # A script may read Slurm's or Open MPI's numbers, even if neither is there.
    numbers = str(rank), str(rank), str(ranks)
    env |= zip(SLURM + OPEN_MPI, 2 * numbers, strict=True)
    others = dict(zip(SLURM_STEP + MPICH, 2 * numbers, strict=True))
    others["SLURM_NPROCS"] = str(ranks)
    return env | {name: others[name] for name in {*others} & {*os.environ}}


def wait_for_ranks(processes):
    """Wait for the first rank that fails, or for all; return the exit status."""
    while True:
        running = [process for process in processes if process.poll() is None]
        failed = [r for r, process in enumerate(processes) if process.returncode]
        if failed or not running:
            break
        time.sleep(0.05)
    statuses = [processes[rank].returncode for rank in failed]
    end_ranks(running, signal.SIGTERM)
    for rank, status in zip(failed, statuses, strict=True):
        if status < 0:
            name = signal.Signals(-status).name
            print(f"Error: no report, since rank {rank} ended by {name}", flush=True)
            return 128 - status
    return max(statuses, default=0)


def end_ranks(processes, number):
    """Send a signal to the ranks; wait half a minute at most for their end."""
    for process in processes:
        process.send_signal(number)
    deadline = time.monotonic() + 30
    while any(process.poll() is None for process in processes):
        if time.monotonic() > deadline:
            return
        time.sleep(0.05)
