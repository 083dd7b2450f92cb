"""Faults that take long: no memory left, a slurmd that is killed, 200 epochs."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import REPOSITORY, copy_room, run

sys.path.append(str(REPOSITORY / "tests/slurm"))
import test_slurm
from test_slurm import cluster, finish, sbatch, slurm  # noqa: F401

EATS = """
import os, torch, torch.distributed as dist
import common.cli
dist.init_process_group()
eaten = []
while dist.get_rank() == 1:
    eaten.append(torch.ones(10_000_000))
dist.all_reduce(torch.ones(1, device="cpu"))
"""
SMALL = ["--layers=1", "--width=16", "--heads=2", "--length=8", "--sequences=64"]


def on_slurm(test):
    for mark in test_slurm.pytestmark:
        test = mark(test)
    return test


@pytest.fixture
def cgroup():
    """A control group whose processes may have 3 GB."""
    memory = Path("/sys/fs/cgroup/memory")
    folder = (memory if memory.exists() else memory.parent) / f"faults-{os.getpid()}"
    name = "memory.limit_in_bytes" if memory.exists() else "memory.max"
    try:
        folder.mkdir()
        (folder / name).write_text(str(3 * 10**9))
    except OSError as error:
        pytest.skip(f"no control group of our own: {error}")
    yield folder
    folder.rmdir()


@pytest.mark.slow
def test_memory_runs_out(cgroup, tmp_path):
    """The kernel ends the rank that took it. It is named, and the likely cause."""
    room = copy_room("exercise8", tmp_path)
    (room / "eats.py").write_text(EATS)
    enter = f'echo $$ > {cgroup}/cgroup.procs && exec "$@"'
    command = ["bash", "-c", enter, "-", "bash", "run-2gpus.sh", "eats.py"]
    done = run(command, room, timeout=200)
    assert done.returncode == 137, done.stderr
    (line,) = done.stderr.splitlines()
    assert line == "Error: rank 1 was ended by SIGKILL (mostly no memory is left)"


def used(process):
    """Return its memory in MB, its open files and its threads."""
    status = Path(f"/proc/{process}/status").read_text()
    memory, threads = re.search(
        r"VmRSS:\s+(\d+).*Threads:\s+(\d+)", status, re.S
    ).groups()
    return int(memory) / 1000, len(os.listdir(f"/proc/{process}/fd")), int(threads)


@pytest.mark.slow
@pytest.mark.parametrize("script", ["single.py", "ddp.py"])
def test_200_epochs_are_flat(script, sample, tmp_path):
    room = copy_room("dp_ddp_intro", tmp_path)
    launcher = "jobscript_ddp.sh" if script == "ddp.py" else "jobscript.sh"
    command = ["bash", launcher, script, *SMALL, "--epochs", "1000000"]
    output = tmp_path / "out"
    with output.open("w") as out:
        job = subprocess.Popen(command, cwd=room, stdout=out, stderr=out)
    try:
        uses, start = [], time.monotonic()
        for epoch in (50, 250):
            while f"Epoch {epoch}: " not in output.read_text():
                assert job.poll() is None, output.read_text()
                time.sleep(0.1)
            found = [job.pid] + [
                int(child)
                for task in Path(f"/proc/{job.pid}/task").iterdir()
                for child in (task / "children").read_text().split()
            ]
            uses.append([used(process) for process in found])
        assert len(uses[0]) == (3 if script == "ddp.py" else 1)
        time.sleep(max(0, 25 - (time.monotonic() - start)))
        # Epochs of less than a second are steps, too.
        assert "no step" not in output.read_text().split("Epoch 50: ")[1]
        for (before, *files), (after, *others) in zip(*uses, strict=True):
            assert after < before + 10, uses  # a file may be open for a moment
            assert all(b < a + 5 for a, b in zip(files, others, strict=True)), uses
    finally:
        job.terminate()
        job.wait()


def running(words):
    """Return the processes with these words in their environment or command."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            text = (folder / "environ").read_bytes() + (
                folder / "cmdline"
            ).read_bytes()
            if all(word.encode() in text for word in words):
                found.append(int(folder.name))
        except OSError:  # it has ended
            pass
    return found


@on_slurm
def test_slurmd_is_killed(sbatch, slurm, tmp_path):  # noqa: F811
    """The job goes on meanwhile, and ends well when slurmd is back."""
    room = copy_room("dp_ddp_intro", tmp_path)
    options = [*SMALL, "--sequences", "2048", "--epochs", "60"]
    job = sbatch(room, "jobscript_ddp_2nodes.sh", "ddp.py", *options)
    output = room / f"slurm-{job}.out"

    def await_epoch(number):
        deadline = time.monotonic() + 60
        while not output.exists() or f"Epoch {number}: " not in output.read_text():
            assert time.monotonic() < deadline, output.read_text()
            time.sleep(0.1)

    await_epoch(2)
    (slurmd,) = running(["slurmd\0-N\0n2", str(slurm)])
    inside = running([f"SLURM_JOB_ID={job}\0", "SLURMD_NODENAME=n2\0"])[0]
    os.kill(slurmd, signal.SIGKILL)
    await_epoch(output.read_text().count("Epoch ") + 5)
    enter = ["nsenter", "--target", str(inside), "--net", "--uts", "--mount"]
    done = run([*enter, "slurmd", "-N", "n2"], "/")
    assert done.returncode == 0, done.stderr
    state, text = finish(job)
    assert (state["JobState"], state["ExitCode"]) == ("COMPLETED", "0:0"), text
    assert "Error" not in text and "Epoch 60: " in text
