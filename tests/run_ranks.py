"""A server that forks scripts from a process with PyTorch imported.

To import it takes each process seconds; a server that has done so forks here.
"""

import functools
import importlib
import os
import random
import runpy
import socket
import sys
import time
from collections import deque
from multiprocessing import forkserver, get_context, set_start_method
from pathlib import Path
from unittest.mock import patch as mock

import torch

from common.data import REPOSITORY
from common.errors import run

# Not modules of the exercises: several of these have the same name.
PRELOADED = ["torch._dynamo", "torch.distributed.fsdp", "torchvision"]
PRELOADED += ["torch.distributed.tensor.parallel", "torch.utils.tensorboard"]
PRELOADED += ["line_profiler"]
# These as well where the tests have imported them.
OURS = {"conftest", "record_training", "gpu.recorder"}
PATIENCE = 30  # seconds, with ranks that wait for one that failed
PORTS = deque(maxlen=100)  # sockets that keep the last ports of free_port()


@functools.cache
def server():
    """Return a context whose processes are forked from the server."""
    context = get_context("forkserver")
    context.set_forkserver_preload([*PRELOADED, *(OURS & sys.modules.keys())])
    folders = REPOSITORY / "tests", REPOSITORY / "tests/no_load", REPOSITORY
    path = os.pathsep.join(map(str, folders))  # where it finds what it imports
    with mock.dict(os.environ, PYTHONPATH=path):
        forkserver.ensure_running()
    return context


def free_port():
    """Return a free port.

    Below 32768: those above the system also gives to each connection that begins,
    and other tests begin many. The port stays bound, so that no other process finds
    it free before a store listens there, which SO_REUSEADDR allows.
    """
    while True:
        port = random.SystemRandom().randrange(20000, 32000)
        bound = socket.socket()
        try:
            bound.bind(("localhost", port))
        except OSError:
            bound.close()
        else:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            PORTS.append(bound)
            return str(port)


def run_script(folder, script, options, env, patch):
    """Run `python SCRIPT OPTIONS` in this folder, inside the new process."""
    os.chdir(folder)
    os.environ |= env
    set_start_method(None, force=True)  # of workers: the default, not this server
    out = Path(f"{env.get('RANK', 0)}.out").open("w", buffering=1)  # noqa: SIM115
    sys.stdout = sys.stderr = sys.__stderr__ = out
    sys.path.insert(0, str(script.parent))
    sys.argv = [script.name, *options]
    if patch is None:
        runpy.run_path(str(script), run_name="__main__")
    else:
        module = importlib.import_module(script.stem)
        patch(module, int(env.get("RANK", 0)))
        run(module.main)


class Run:
    """A script that runs as one process (ranks=0), or with this number of ranks."""

    target = staticmethod(run_script)

    def __init__(
        self,
        folder,
        data,
        script,
        *options,
        ranks=0,
        per_node=0,
        port=None,
        patch=None,
        **env,
    ):
        """folder: where it runs; script: its path, or that within the repository.

        per_node: how many of the ranks play a node; by default all. port: where they
        meet; by default a free one. patch: called with the script's module and the
        rank before main().
        """
        self.folder, self.processes = folder, []
        env["DATADIR"] = str(data)
        per_node, port = per_node or ranks, port or free_port()
        for rank in range(max(1, ranks)):
            (folder / f"{rank}.out").unlink(missing_ok=True)
            if ranks:
                env |= {"RANK": str(rank), "LOCAL_RANK": str(rank % per_node)}
                env |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(per_node)}
                env |= {"MASTER_ADDR": "localhost", "MASTER_PORT": port}
            args = folder, REPOSITORY / script, [*map(str, options)], {**env}, patch
            self.processes.append(server().Process(target=self.target, args=args))
        for process in self.processes:
            process.start()

    def output(self, rank=0):
        file = self.folder / f"{rank}.out"
        return file.read_text() if file.exists() else ""

    def alive(self):
        return all(process.is_alive() for process in self.processes)

    def kill(self):
        for process in self.processes:
            process.kill()  # SIGKILL
        for process in self.processes:
            process.join()
        return [process.exitcode for process in self.processes]

    def join(self, limit=300):
        """Return the exit statuses, None for a rank that had to be killed.

        limit: in seconds. When a rank fails, the others may wait for it for ever, so
        they are killed after PATIENCE.
        """
        end = time.monotonic() + limit
        while any(process.is_alive() for process in self.processes):
            if any(process.exitcode for process in self.processes):
                end = min(end, time.monotonic() + PATIENCE)
            if time.monotonic() > end:
                break
            time.sleep(0.05)
        statuses = [process.exitcode for process in self.processes]
        self.kill()
        return statuses

    def results(self):
        """Wait for its end; return the content of each RANK.pt."""
        statuses = self.join()
        assert set(statuses) == {0}, "\n".join(
            map(self.output, range(len(statuses)))
        )
        files = [self.folder / f"{rank}.pt" for rank in range(len(statuses))]
        results = [torch.load(file, "cpu") for file in files]
        for file in files:
            file.unlink()  # they are large
        return results
