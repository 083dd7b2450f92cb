"""cinic_requeue.py: a stopped job resumes as if it had never been stopped."""

import os
import re
import signal
import sys
import time
from functools import partial
from pathlib import Path

import pytest
from conftest import REPOSITORY, copy_exercise
from conftest import load as load_module
from conftest import run as run_command
from fork_ranks import Run
from test_checkpoint import SmallRun, same
from test_checkpoint import load as read
from test_faults import Job

sys.path.append(str(REPOSITORY / "tests/slurm"))
import test_slurm
from test_slurm import finish, info, processes, sbatch, slurm  # noqa: F401

SCRIPT = "cinic_requeue.py"
# 100 images, 2 processes: 5 steps of 12 in an epoch, the last smaller.
OPTIONS = ["--epochs=4", "--log-interval=1", "--batch-size=12", "--lr=0.01"]
RESUME = [*OPTIONS, "--resume", "checkpoint.pth.tar"]


def on_slurm(test):
    for mark in test_slurm.pytestmark:
        test = mark(test)
    return test


@pytest.fixture(scope="module")
def undisturbed(sample, tmp_path_factory):
    """Return the checkpoint and output of an uninterrupted run of cinic_ddp.py."""
    exercise = copy_exercise("cinic_lab", tmp_path_factory.mktemp("whole"))
    run = Run(exercise, sample, "cinic_lab/cinic_ddp.py", *OPTIONS, ranks=2)
    assert run.join() == [0, 0], run.output()
    return read(exercise), run.output()


def epoch_lines(text):
    """Return the printed means, without the times."""
    return re.findall(r"^Epoch: (\S+)  .*  (Loss .*)$|^ (\* Acc.*)$", text, re.M)


def request_stop(file, module, rank):
    """Create the stop file for rank 1 only."""
    file.touch()
    if rank == 1:
        os.environ["STOP_FILE"] = str(file)


def test_stopped_after_each_epoch(undisturbed, sample, tmp_path):
    """All ranks exit together if one sees the stop file, but not at the end."""
    exercise, options, printed = copy_exercise("cinic_lab", tmp_path), OPTIONS, ""
    command = exercise, sample, f"cinic_lab/{SCRIPT}"
    patch = partial(request_stop, tmp_path / "stop")
    for status in (85, 85, 85, 0):
        run = Run(*command, *options, ranks=2, patch=patch)
        assert run.join() == [status, status], run.output()
        assert run.output().count("Stopped after epoch") == (status == 85)
        printed += run.output()
        options = RESUME
    assert same(exercise, undisturbed[0])
    assert epoch_lines(printed) == epoch_lines(undisturbed[1])
    assert len((exercise / "logs/results.jsonl").read_text().splitlines()) == 1


def await_text(file, text, seconds=120):
    deadline = time.monotonic() + seconds
    while not (file.exists() and text in file.read_text()):
        assert time.monotonic() < deadline, file.exists() and file.read_text()
        time.sleep(0.05)


def copy_that_sleeps(folder, seconds):
    """Copy the lesson; its script sleeps before each step. Return the copy."""
    exercise = copy_exercise("cinic_lab", folder)
    line, text = "            sums += train_step", (exercise / SCRIPT).read_text()
    assert text.count(line) == 1
    sleeps = text.replace(line, f"            time.sleep({seconds})\n{line}")
    (exercise / SCRIPT).write_text(sleeps)
    return exercise


# Time for a test to act before the epoch ends
BEFORE_THE_LAST_STEP = "2 * (step == 5)"


@pytest.mark.slow
def test_the_run_script_without_slurm(undisturbed, sample, tmp_path):
    """It ends with the ranks' status, however many signals it gets."""
    exercise = copy_that_sleeps(tmp_path, BEFORE_THE_LAST_STEP)
    command = "bash", "run-requeue.sh", SCRIPT
    job = Job([*command, *OPTIONS], exercise, sample)
    job.wait_for("Epoch: [2][1/5]")
    for _ in range(3):
        job.process.send_signal(signal.SIGUSR1)
        time.sleep(0.1)
    assert job.process.wait(60) == 85, job.output()
    printed = job.output()
    assert "Stopped after epoch 2: use --resume checkpoint.pth.tar\n" in printed
    assert "[3][1/5]" not in printed and "Traceback" not in printed
    assert not list(exercise.glob("logs/stop-*"))
    status, output = Job([*command, *RESUME], exercise, sample).end()
    assert status == 0 and same(exercise, undisturbed[0]), output


def test_a_requeued_job_takes_its_own_checkpoint(tmp_path, monkeypatch):
    """The newest, whatever other jobs and scripts have left."""
    monkeypatch.chdir(tmp_path)
    requeue, mine = load_module("cinic_lab", "requeue"), "cinic_requeue-7-1123"
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "2")
    folder = Path(f"logs/{mine}-103")
    assert requeue.find_checkpoint(folder) is None
    others = "cinic_requeue-77-1123-100", "cinic_ddp-7-1123-102"
    for age, name in enumerate((*others, f"{mine}-99", f"{mine}-101")):
        SmallRun(folder=f"logs/{name}").save(1, 0.0)
        checkpoint = Path(f"logs/{name}/checkpoint.pth.tar")
        os.utime(checkpoint, (0, 100 - age))
    assert requeue.find_checkpoint(folder) == f"logs/{mine}-99/{checkpoint.name}"
    monkeypatch.delenv("SLURM_RESTART_COUNT")  # the second run of one allocation
    assert requeue.find_checkpoint(folder) is None


def started_again(job, times):
    """Wait until a job is back in the queue, and start it at once."""
    deadline = time.monotonic() + 100
    while info(job)["JobState"] != "PENDING" or info(job)["Restarts"] != str(times):
        assert time.monotonic() < deadline, (times, str(info(job)))
        time.sleep(0.2)
    while processes(job):  # or the old script's end is taken for the new one's
        assert time.monotonic() < deadline, processes(job)
        time.sleep(0.2)
    time.sleep(2)
    now = "scontrol", "update", f"jobid={job}", "starttime=now"
    assert run_command(now, "/").returncode == 0  # it would wait two minutes


@on_slurm
def test_a_job_is_stopped_in_two_ways(sbatch, undisturbed, tmp_path):  # noqa: F811
    """By a signal, and by scontrol requeue, as after a node failure."""
    exercise = copy_that_sleeps(tmp_path, BEFORE_THE_LAST_STEP)
    job = sbatch(exercise, "run-requeue.sh", SCRIPT, *OPTIONS)
    out = exercise / f"slurm-{job}.out"
    await_text(out, "Epoch: [1][2/5]")
    run_command(["scancel", "--signal=USR1", "--batch", job], "/")
    await_text(out, "Stopped after epoch 1")
    started_again(job, 1)
    await_text(out, "Epoch: [2][1/5]")
    run_command(["scontrol", "requeue", job], "/")
    started_again(job, 2)
    state, output = finish(job, 120)
    assert (state["JobState"], state["ExitCode"]) == ("COMPLETED", "0:0"), output
    assert [output.count(f"Epoch: [{n}][1/5]") for n in (1, 2, 3, 4)] == [1, 2, 1, 1]
    assert "Traceback" not in output and same(exercise, undisturbed[0])
