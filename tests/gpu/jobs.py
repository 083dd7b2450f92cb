"""Scripts that `make test-gpu` runs, as one process or as ranks."""

import json
import math
import os
import re
import signal
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
import torch
from gpu.recorder import record
from run_ranks import Run, run_script

from common.data import REPOSITORY

BATCHNORM = "cifar100_demo", "cinic_lab"
WAIT = [
    *("model_parallel", "pipeline"),  # parts of a model wait for each other
    "experts",  # the CPU must know how many tokens each rank sends
]


def skip_unless_ranks_share():
    """Skip a row of two ranks if they cannot share this machine's one GPU."""
    if torch.accelerator.device_count() != 1:
        return
    if torch.version.hip:
        pytest.skip("nobody has tried whether RCCL lets ranks share a GPU")
    version = torch.cuda.nccl.version()
    if version < (2, 30):
        pytest.skip(f"NCCL {'.'.join(map(str, version))} cannot share a GPU")


def run_captured(folder, script, options, env, patch):
    """Run a script in the new process, with what C++ and NCCL print as well."""
    os.setsid()  # to end it with its own processes
    file = os.open(folder / f"{env.get('RANK', 0)}.c.out", os.O_CREAT | os.O_WRONLY)
    os.dup2(file, 1)
    os.dup2(file, 2)
    run_script(folder, script, options, env, patch)


class Job(Run):
    """A script that runs as one process (ranks=0), or with this number of ranks.

    with Job(folder, script, *options, ranks=2) as job:
        output = job.wait()
    """

    target = staticmethod(run_captured)

    def __init__(self, folder, script, *options, ranks=0, **how):
        """folder: a new one; script: its path within the repository."""
        if ranks:
            skip_unless_ranks_share()
        (folder / "logs").mkdir(parents=True)
        data = os.environ["DATADIR"]
        super().__init__(folder, data, script, *options, ranks=ranks, **how)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.kill()
        print(self.output())  # pytest shows it if the row fails

    def kill(self):
        for process in self.processes:
            with suppress(ProcessLookupError):  # it has ended, or not yet begun
                os.killpg(process.pid, signal.SIGKILL)
        return super().kill()

    def output(self):
        """Return what all ranks have printed."""
        files = sorted(self.folder.glob("*.out"))
        return "\n".join(file.read_text(errors="replace") for file in files)

    def wait(self, expected=0):
        """Return the output; fail with another exit status.

        pytest-timeout ends a row that hangs.
        """
        status = max(filter(None, self.join(math.inf)), default=0)
        assert status == expected, f"exit status {status}"
        return self.output()

    def records(self):
        """Return what record() of recorder.py saved for each rank."""
        files = [self.folder / f"{rank}.json" for rank in range(len(self.processes))]
        return [json.loads(file.read_text()) for file in files]


def ranks_of(script):
    """Return 2 for a script with process groups, else 0: one process."""
    text = (REPOSITORY / script).read_text()
    return 2 if "init_process_group" in text else 0


def run_recorded(folder, script, options, cnn=False, **how):
    """Run a training script; return its printed losses, speed, and records.

    how: what else Job() takes, such as variables of the environment.
    """
    freeze = cnn and script.startswith(BATCHNORM)
    how |= {"patch": partial(record, draw_on_cpu=cnn, freeze=freeze)}
    with Job(folder, script, *options, ranks=ranks_of(script), **how) as job:
        output, records = job.wait(), job.records()
    losses = re.findall(r"[Ll]oss:?\s+(\d+\.\d+)", output)
    speeds = re.findall(r"Epoch.* ([\d.]+) \w+/s", output)
    run = {"printed": [float(loss) for loss in losses]}
    run["per_second"] = float(speeds[-1]) if speeds else None
    run |= {name: records[0][name] for name in ("steps", "waits", "lines")}
    if cnn:
        names = "training", "evaluation", "weights"
        run["ranks"] = [{name: r[name] for name in names} for r in records]
    waits = run["waits"] and Path(script).stem not in WAIT
    assert not waits, f"each step waits for the GPU: {run}"
    return run
