"""Faults: each ends the job with its own error, and leaves no process behind.

Each is tried on one script for each way in which it may be launched.
"""

import os
import re
import subprocess
import time
from pathlib import Path

import pytest
from conftest import (
    QUICK,
    copy_exercise,
    fails,
    on_terminal,
    run,
    slow,
)

SMALL = ["--layers=1", "--width=16", "--heads=2", "--length=16", "--sequences=64"]
LONG = [*SMALL, "--epochs=10000"]  # some minutes, even if nothing ends it
NAME = "pytorch_dvc_cnn_pretrained"


class Job:
    """A running command in a folder, whose output goes to a file."""

    def __init__(self, command, folder, datadir="", **env):
        self.folder, self.file = folder, folder / "output"
        env = {**os.environ, "DATADIR": str(datadir), **env}
        with self.file.open("w") as out:
            streams = {"stdout": out, "stderr": out}
            self.process = subprocess.Popen(command, cwd=folder, env=env, **streams)

    def output(self):
        return self.file.read_text()

    def wait_for(self, line, seconds=200):
        """Wait until the job has printed this line."""
        deadline = time.monotonic() + seconds
        while line not in self.output():
            assert self.process.poll() is None, self.output()
            assert time.monotonic() < deadline, self.output()
            time.sleep(0.1)

    def end(self, seconds=200):
        """Wait until all processes have ended; return exit status and output."""
        status = self.process.wait(timeout=seconds)
        wait_for_end(self.folder)
        return status, self.output()


def processes_in(folder):
    """Return the processes whose working directory is this folder."""
    links = Path("/proc").glob("[0-9]*/cwd")
    return [link for link in links if os.path.realpath(link) == str(folder)]


def wait_for_end(folder):
    """Wait until no process has this working directory."""
    deadline = time.monotonic() + 20
    while found := processes_in(folder):
        assert time.monotonic() < deadline, found
        time.sleep(0.1)


@pytest.fixture
def intro(tmp_path):
    return copy_exercise("dp_ddp_intro", tmp_path)


@pytest.mark.parametrize(
    "launch, script, words",
    [
        ("run-2gpus.sh", f"{NAME}_multigpu.py", "run `python download_data.py`"),
        slow("run-2nodes.sh", f"{NAME}_multigpu.py", "run `python download_data"),
        slow("run.sh", f"{NAME}_multigpu.py", "run `torchrun --standalone --nproc"),
        slow("run-2gpus.sh", f"{NAME}.py", "torchrun started 2: run `python"),
    ],
)
def test_a_students_mistake_is_one_line(launch, script, words, exercise, tmp_path):
    """No data, or the other launcher: status 2, and nothing is written."""
    done = run(["bash", launch, script, *QUICK], exercise, tmp_path / "none")
    fails(done, words)
    assert not (exercise / "logs").exists()


def test_an_infinite_loss_is_a_mistake_too(intro):
    done = run(["bash", "jobscript.sh", "single.py", *SMALL, "--lr=1e9"], intro)
    line = r"Error: the loss is (nan|inf): use a smaller --lr.*\n"
    assert done.returncode == 2 and re.fullmatch(line, done.stderr), done.stderr
    assert not (intro / "logs/results.jsonl").exists()


# One rank fails: its own error is shown, and the job ends


FAILS = """
import os, signal, sys, torch, torch.distributed as dist
from common.errors import run

def main():
    dist.init_process_group()
    dist.all_reduce(torch.ones(1))
    if dist.get_rank() == 1:
        if sys.argv[1:] == ["kill"]:
            os.kill(os.getpid(), signal.SIGKILL)
        raise ValueError("this is it")
    dist.all_reduce(torch.ones(1))

run(main)
"""


RAISED = r"(?:\[rank1\]: )?ValueError: this is it"
KILLED = r"Error: rank 1: Signal 9 \(SIGKILL\) received by PID \d+"


@pytest.mark.parametrize(
    "launch, how, line",
    [
        ("jobscript_ddp.sh", "raise", RAISED),
        ("jobscript_ddp.sh", "kill", KILLED),
        slow("jobscript_ddp_2nodes.sh", "raise", RAISED),
    ],
)
def test_an_error_of_one_rank_ends_the_job(launch, how, line, intro):
    (intro / "fails.py").write_text(FAILS)
    status, output = Job(["bash", launch, "fails.py", how], intro).end()
    assert status != 0 and len(re.findall(f"^{line}$", output, re.M)) == 1, output
    assert "ChildFailedError" not in output and "error_file" not in output


@pytest.mark.parametrize(
    "command",
    [
        "jobscript.sh single.py",
        "jobscript_ddp.sh ddp.py",
        slow("jobscript_ddp_2nodes.sh ddp.py"),
    ],
)
def test_ctrl_c_ends_all(command, intro):
    command = ["bash", *command.split(), *LONG]
    status, shown = on_terminal(command, intro, stop_at="Epoch 2: ")
    assert status != 0 and "Epoch 2: " in shown, shown
    # One process says where it was, as Python does; of the ranks none does.
    assert shown.count("Traceback") == (command[1] == "jobscript.sh"), shown
    wait_for_end(intro)
    assert not (intro / "logs/results.jsonl").exists()
