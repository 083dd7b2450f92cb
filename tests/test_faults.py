"""Faults: each ends the job with its own error, and leaves no process behind.

Each is tried on one script for each way in which it may be launched.
"""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import (
    QUICK,
    REPOSITORY,
    copy_exercise,
    fails,
    on_terminal,
    run,
    without_gloo,
)

SMALL = ["--layers=1", "--width=16", "--heads=2", "--length=16", "--sequences=64"]
ENDLESS = [*SMALL, "--epochs=1000000"]
slow = pytest.mark.slow
each_launch = pytest.mark.parametrize(
    "launch",
    ["jobscript_ddp.sh", pytest.param("jobscript_ddp_2nodes.sh", marks=slow)],
)
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
        return without_gloo(self.file.read_text())

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


# A student's mistakes: through the run scripts, one line and status 2


@pytest.mark.parametrize(
    "launch, script",
    [
        pytest.param("run.sh", NAME, marks=slow),
        ("run-2gpus.sh", f"{NAME}_multigpu"),
    ],
)
def test_missing_data_and_weights(launch, script, exercise, sample, tmp_path):
    command = ["bash", launch, f"{script}.py"]
    done = run([*command, *QUICK], exercise, tmp_path / "none")
    words = "run `python download_data.py`", "`python sample_data.py`"
    fails(done, f"no {tmp_path}/none/dogs-vs-cats/train.pt: ", *words)
    done = run(command, exercise, sample, TORCH_HOME=str(tmp_path / "hub"))
    fails(done, f"no weights in {tmp_path}/hub/", "run `python download_weights.py`")
    assert not (exercise / "logs").exists()


@pytest.mark.slow
def test_the_other_launcher(exercise, sample):
    done = run(["bash", "run.sh", f"{NAME}_multigpu.py", *QUICK], exercise, sample)
    launch = "torchrun --standalone --nproc-per-node=2"
    fails(done, f"run `{launch} {NAME}_multigpu.py --backbone tinyvgg", "run script")
    done = run(["bash", "run-2gpus.sh", f"{NAME}.py", *QUICK], exercise, sample)
    fails(
        done,
        f"one process, but torchrun started 2: run `python {NAME}.py --backbone",
    )


def test_more_processes_than_gpus(exercise, sample):
    """A disguise counts one GPU."""
    env = {"PYTHONPATH": str(REPOSITORY / "tests/disguise")}
    command = ["bash", "run-2gpus.sh", f"{NAME}_multigpu.py", *QUICK]
    done = run(command, exercise, sample, CUDA_VISIBLE_DEVICES="0", **env)
    words = "--nproc-per-node=1", "`export NCCL_MULTI_RANK_GPU_ENABLE=1`"
    fails(done, "2 processes, but 1 GPU on this node: use", *words)


def test_closed_stdout(intro):
    line = [sys.executable, "single.py", *SMALL, "--epochs=1"]
    done = run(["bash", "-c", '"$@" >&-', "bash", *line], intro)
    assert (done.returncode, done.stderr) == (0, "")
    assert (intro / "logs/results.jsonl").exists()


def test_a_copy_without_symbolic_links(tmp_path):
    """As with git's core.symlinks=false: install.sh is the first that runs."""
    (tmp_path / "exercise8").mkdir()
    (tmp_path / "exercise8/common").write_text("../common")
    done = run(["bash", REPOSITORY / "install.sh", sys.executable], tmp_path)
    fails(done, "lost its symbolic links", "git config core.symlinks true")
    assert not (tmp_path / ".venv").exists()


def test_a_failed_environment_leaves_nothing(tmp_path):
    """As on Ubuntu without python3-venv: env.sh would look for its activate."""
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nmkdir .venv\nexit 1\n")
    python.chmod(0o755)
    done = run(["bash", REPOSITORY / "install.sh", python], tmp_path, TORCH="cpu")
    assert done.returncode == 1 and not (tmp_path / ".venv").exists()


def test_an_infinite_loss(intro):
    done = run(["bash", "jobscript_ddp.sh", "ddp.py", *SMALL, "--lr=1e9"], intro)
    line = r"(Error: the loss is (nan|inf): use a smaller --lr.*\n)+"  # of each rank
    assert done.returncode == 2 and re.fullmatch(line, done.stderr), done.stderr
    assert not (intro / "logs/results.jsonl").exists()


@each_launch
def test_a_user_error_of_all_ranks_is_one_line(launch, intro):
    script = "from common.errors import *\ndef f(): raise UserError('a: b')\nrun(f)"
    (intro / "mistake.py").write_text(script)
    done = run(["bash", launch, "mistake.py"], intro)
    done.stdout = re.sub("^Nodes: .*\n", "", done.stdout)
    fails(done, "Error: a: b")


NAMESPACES = run(["unshare", "--user", "--net", "true"], "/").returncode == 0


@pytest.mark.skipif(not NAMESPACES, reason="no user namespaces here")
def test_a_machine_whose_name_nobody_knows(intro):
    named = "hostname nobody-knows-me; exec bash jobscript_ddp.sh plain_ddp.py"
    spaces = ["unshare", "--user", "--map-root-user", "--uts"]
    done = run([*spaces, "bash", "-c", named], intro, timeout=200)
    assert done.returncode == 0 and "Epoch 4: " in done.stdout, done.stderr


def test_left_over_rank(intro):
    done = run(["bash", "jobscript.sh", "ddp.py", *SMALL], intro, RANK="0")
    fails(done, "needs one process per GPU: run")


def test_left_over_ranks_change_nothing_for_one_process(intro):
    env = {"RANK": "1", "WORLD_SIZE": "2"}
    done = run(["bash", "jobscript.sh", "single.py", *SMALL], intro, **env)
    assert done.returncode == 0 and "single on 1 x CPU core" in done.stdout
    assert (intro / "logs/results.jsonl").exists()


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


@each_launch
@pytest.mark.parametrize(
    "how, line",
    [
        ("raise", r"(?:\[rank1\]: )?ValueError: this is it"),
        ("kill", r"Error: rank 1: Signal 9 \(SIGKILL\) received by PID \d+"),
    ],
)
def test_an_error_of_one_rank_ends_the_job(how, line, launch, intro):
    (intro / "fails.py").write_text(FAILS)
    status, output = Job(["bash", launch, "fails.py", how], intro).end()
    assert status != 0 and len(re.findall(f"^{line}$", output, re.M)) == 1, output
    assert "ChildFailedError" not in output and "error_file" not in output


@slow
@pytest.mark.parametrize(
    "exercise, command",
    [
        ("cifar100_demo", "run_single_cifar.sh --arch=resnet18 --image-size=40"),
        ("mnist_multigpu", "slurm_multigpu.sh --epochs=1000"),
    ],
)
def test_a_run_script_leaves_no_process(exercise, command, sample, tmp_path):
    """The monitor, and other processes of the run script."""
    job = Job(["bash", *command.split()], copy_exercise(exercise, tmp_path), sample)
    job.wait_for("Epoch")
    job.process.terminate()
    assert job.end()[0] in (-signal.SIGTERM, 128 + signal.SIGTERM)


@pytest.mark.parametrize(
    "command",
    [
        "jobscript.sh single.py",
        "jobscript_ddp.sh ddp.py",
        pytest.param("jobscript_ddp_2nodes.sh ddp.py", marks=slow),
    ],
)
def test_ctrl_c_ends_all(command, intro):
    command = ["bash", *command.split(), *ENDLESS]
    status, shown = on_terminal(command, intro, stop_at="Epoch 2: ")
    assert status != 0 and "Epoch 2: " in shown, shown
    # One process says where it was, as Python does; of the ranks none does.
    assert shown.count("Traceback") == (command[1] == "jobscript.sh"), shown
    wait_for_end(intro)
    assert not (intro / "logs/results.jsonl").exists()
