"""Starts scripts' main() in processes that have imported PyTorch already.

It takes each process seconds to import; a server that has done so forks here.
"""

import functools
import os
import sys
from multiprocessing import forkserver, get_context
from pathlib import Path

import pytest
from conftest import REPOSITORY, free_port

FOLDER = REPOSITORY / "cinic_lab"


@functools.cache
def server():
    """Start the server; return what makes processes of it."""
    context = get_context("forkserver")
    context.set_forkserver_preload(["ranks_preload"])
    with pytest.MonkeyPatch.context() as patch:  # where it finds what it imports
        patch.setenv(
            "PYTHONPATH",
            f"{REPOSITORY / 'tests'}:{REPOSITORY / 'tests/rules'}:{FOLDER}",
        )
        forkserver.ensure_running()
    return context


def main_of(room, datadir, script, options, rank, ranks, port, patch):
    """In the new process: what `python SCRIPT OPTIONS` does, as one of the ranks."""
    os.chdir(room)
    sys.path.insert(0, str(FOLDER))
    out = Path(f"{rank}.out").open("w", buffering=1)  # noqa: SIM115
    sys.stdout = sys.stderr = sys.__stderr__ = out
    os.environ["DATADIR"] = str(datadir)
    if ranks:
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        os.environ |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
        os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": port}
    sys.argv = [script, *map(str, options)]
    module = __import__(script.removesuffix(".py"))
    if patch:
        patch(module, rank)
    try:
        module.main()
    except BaseException:
        sys.excepthook(*sys.exc_info())
        raise


class Run:
    """A script as one process (ranks=0), or as so many ranks."""

    def __init__(self, room, datadir, script, *options, ranks=0, patch=None):
        self.room = room
        port = free_port()
        self.processes = []
        for rank in range(max(1, ranks)):
            (room / f"{rank}.out").unlink(missing_ok=True)
            args = room, datadir, script, options, rank, ranks, port, patch
            self.processes.append(server().Process(target=main_of, args=args))
        for process in self.processes:
            process.start()

    def output(self, rank=0):
        file = self.room / f"{rank}.out"
        return file.read_text() if file.exists() else ""

    def alive(self):
        return all(process.is_alive() for process in self.processes)

    def kill(self):
        for process in self.processes:
            process.kill()  # SIGKILL
        return self.join()

    def join(self):
        for process in self.processes:
            process.join(120)
        return [process.exitcode for process in self.processes]
