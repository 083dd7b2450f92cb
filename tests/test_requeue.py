"""cinic_requeue.py: a stopped job resumes as if it had never been stopped.

slurm/test_slurm.py has a job that Slurm stops and starts again.
"""

import os
import re
import signal
from functools import partial
from pathlib import Path

import pytest
from conftest import copy_exercise, load
from run_ranks import Run
from test_checkpoint import SmallRun, same
from test_checkpoint import load as read
from test_faults import Job

SCRIPT = "cinic_requeue.py"
# 100 images, 2 processes: 5 steps of 12 in an epoch, the last smaller.
OPTIONS = ["--epochs=4", "--log-interval=1", "--batch-size=12", "--lr=0.01"]
RESUME = [*OPTIONS, "--resume", "checkpoint.pth.tar"]


def epoch_lines(text):
    """Return the printed means, without the times."""
    return re.findall(r"^Epoch: (\S+)  .*  (Loss .*)$|^ (\* Acc.*)$", text, re.M)


def request_stop(file, module, rank):
    """Create the stop file for rank 1 only."""
    file.touch()
    if rank == 1:
        os.environ["STOP_FILE"] = str(file)


def test_stopped_after_each_epoch(sample, tmp_path):
    """All ranks exit together if one sees the stop file, but not at the end."""
    run = Run(tmp_path, sample, "cinic_lab/cinic_ddp.py", *OPTIONS, ranks=2)
    assert run.join() == [0, 0], run.output()
    undisturbed, expected = read(tmp_path), epoch_lines(run.output())
    command, options = (tmp_path, sample, f"cinic_lab/{SCRIPT}"), OPTIONS
    patch, printed = partial(request_stop, tmp_path / "stop"), ""
    for status in (85, 85, 85, 0):
        run = Run(*command, *options, ranks=2, patch=patch)
        assert run.join() == [status, status], run.output()
        assert run.output().count("Stopped after epoch") == (status == 85)
        printed += run.output()
        options = RESUME
    assert same(tmp_path, undisturbed) and epoch_lines(printed) == expected
    results = (tmp_path / "logs/results.jsonl").read_text().splitlines()
    assert len(results) == 2  # that of a stopped run is not written


def copy_that_sleeps(folder):
    """Return a copy of the lesson whose script sleeps before an epoch's last step.

    A test has this time to act before the epoch ends.
    """
    exercise = copy_exercise("cinic_lab", folder)
    line, text = "            sums += train_step", (exercise / SCRIPT).read_text()
    assert text.count(line) == 1
    sleeps = f"            time.sleep(2 * (step == num_steps))\n{line}"
    (exercise / SCRIPT).write_text(text.replace(line, sleeps))
    return exercise


@pytest.mark.slow
def test_the_run_script_without_slurm(sample, tmp_path):
    """It ends with the ranks' status, and nothing requeues it."""
    exercise = copy_that_sleeps(tmp_path)
    command = "bash", "run-requeue.sh", SCRIPT, *OPTIONS
    job = Job(command, exercise, sample)
    job.wait_for("Epoch: [1][1/5]")
    job.process.send_signal(signal.SIGUSR1)
    status, output = job.end()
    assert status == 85 and "Traceback" not in output, output
    assert "Stopped after epoch 1: use --resume checkpoint.pth.tar\n" in output
    assert not list(exercise.glob("logs/stop-*"))


def test_a_requeued_job_takes_its_own_checkpoint(tmp_path, monkeypatch):
    """The newest, whatever other jobs and scripts have left."""
    monkeypatch.chdir(tmp_path)
    requeue, mine = load("cinic_lab", "requeue"), "cinic_requeue-7-1123"
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
