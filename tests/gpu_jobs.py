"""Scripts as processes forked from one Python that has imported PyTorch.

A new Python takes seconds to import PyTorch, and `make test-gpu` starts a hundred
ranks. So a server imports it once, and forks. The server never touches a GPU, since
a forked process cannot use what its parent has opened there.
"""

import functools
import json
import os
import re
import runpy
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from multiprocessing import forkserver, get_context, set_start_method
from pathlib import Path

from common.data import REPOSITORY

PRELOADED = ["record_script", "torch._dynamo", "torch.distributed.fsdp"]
PRELOADED += ["torch.distributed.tensor.parallel", "torch.utils.tensorboard"]
PRELOADED += ["torchvision", "line_profiler"]
RANKS = 8  # at a time
starting, waiting = threading.Lock(), threading.Lock()
slots = threading.Semaphore(RANKS)
running = set()


class Failed(Exception):
    """A test that failed, with the reason in one line."""


@functools.cache
def server():
    """Return a context whose processes are forked from the server."""
    context = get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    tests, before = REPOSITORY / "tests", os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = f"{tests}:{REPOSITORY}:{before or ''}"
    # Packages that ask whether there is a GPU must not open it.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    forkserver.ensure_running()
    os.environ.pop("PYTHONPATH")
    if before is not None:
        os.environ["PYTHONPATH"] = before
    return context


def free_port():
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return str(probe.getsockname()[1])


def run_script(folder, script, options, env, record):
    """Run `python SCRIPT OPTIONS` in a folder, inside the new process."""
    os.setsid()  # to end a loader's workers with their script
    os.chdir(folder)
    os.environ |= env
    set_start_method(None, force=True)  # of workers: the default, not this server
    rank = env.get("RANK", "0")
    out = open(f"{rank}.out", "w", buffering=1)  # noqa: SIM115
    os.dup2(out.fileno(), 1)  # NCCL writes past Python
    os.dup2(out.fileno(), 2)
    sys.stdout = sys.stderr = sys.__stderr__ = out
    sys.path.insert(0, str(script.parent))
    sys.argv = [str(script), *options]
    if record is None:
        runpy.run_path(str(script), run_name="__main__")
    else:
        from record_script import run_and_record

        found = run_and_record(script, **record)
        Path(f"{rank}.json").write_text(json.dumps(found))


def explain(status, output):
    """Return in one line why a command failed: its first error, or its last line."""
    wrong = re.search(r"^(\[rank\d+\]: )?\S*Error.*|^  broken.*", output, re.M)
    return f"status {status}: {wrong[0] if wrong else output.strip()[-200:]}"


class Job:
    """A script that runs as one process (ranks=0), or with this number of ranks.

        with Job(folder, script, *options, ranks=2) as job:
            output = job.wait()

    It starts as soon as its ranks are among the RANKS that may run at a time.
    record: None, or the options of run_and_record().
    """

    def __init__(self, folder, script, *options, ranks=0, record=None, **env):
        """folder: an empty one; script: its path within the repository."""
        folder.mkdir(parents=True)
        (folder / "logs").mkdir()
        self.folder, self.ranks, self.processes = folder, max(1, ranks), []
        with waiting:  # else two jobs may each have half of what they need
            for _ in range(self.ranks):
                slots.acquire()
        port, options = free_port(), [str(option) for option in options]
        script = REPOSITORY / script
        for rank in range(self.ranks):
            if ranks:
                env |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                env |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
                env |= {"MASTER_ADDR": "localhost", "MASTER_PORT": port}
            args = folder, script, options, {**env}, record
            with starting:
                process = server().Process(target=run_script, args=args)
                process.start()
            self.processes.append(process)
        running.add(self)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.kill()
        running.discard(self)
        slots.release(self.ranks)

    def kill(self):
        for process in self.processes:
            with suppress(ProcessLookupError):  # no more, or not yet its own session
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()
            process.join()

    def output(self):
        files = [self.folder / f"{rank}.out" for rank in range(self.ranks)]
        texts = [file.read_text(errors="replace") for file in files if file.exists()]
        return "\n".join(texts)

    def wait(self, limit=300, expected=0):
        """Return the output; raise Failed after the limit or with another status."""
        end = time.monotonic() + limit
        while any(process.is_alive() for process in self.processes):
            if any(process.exitcode for process in self.processes):
                # The others may wait for ever for a rank that failed.
                end = min(end, time.monotonic() + 30)
            if time.monotonic() > end:
                break
            time.sleep(0.05)
        statuses = [process.exitcode for process in self.processes]
        status = max(filter(None, statuses), default=0)
        if None in statuses and not status:
            line = self.output().strip().rpartition("\n")[2]
            raise Failed(f"timed out after {limit} s: {line}")
        if status != expected:
            raise Failed(explain(status, self.output()))
        return self.output()

    def records(self):
        """Return what each rank's run_and_record() returned."""
        files = [self.folder / f"{rank}.json" for rank in range(self.ranks)]
        return [json.loads(file.read_text()) for file in files]


def end_all_jobs():
    for job in list(running):
        job.kill()
