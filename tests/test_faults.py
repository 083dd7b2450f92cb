"""Faults: each ends the job with one line, and leaves no process or partial file.

Each is tried on one script for each way in which it may be launched.
"""

import os
import re
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest
import torch
from conftest import (
    QUICK,
    REPOSITORY,
    copy_exercise,
    fails,
    on_terminal,
    run,
    without_gloo,
)

from common.cli import excepthook

SMALL = ["--layers=1", "--width=16", "--heads=2", "--length=16", "--sequences=64"]
ENDLESS = [*SMALL, "--epochs=1000000"]
LONG_EPOCH = [*SMALL, "--sequences=1000000"]
slow = pytest.mark.slow
each_launch = pytest.mark.parametrize(
    "launch",
    ["jobscript_ddp.sh", pytest.param("jobscript_ddp_2nodes.sh", marks=slow)],
)
# Rank 1 gets a signal in this function, so many seconds after it was first called.
FAULTY = """
import os, signal, time
import ddp

function, calls = ddp.{function}, []

def faulty(*args, **kwargs):
    calls.append(time.monotonic())
    if os.environ["RANK"] == "1" and calls[-1] >= calls[0] + {after}:
        os.kill(os.getpid(), signal.{name})
    return function(*args, **kwargs)

ddp.{function} = faulty
ddp.main()
"""


class Job:
    """A running command, whose processes have a common word in their environment."""

    def __init__(self, command, folder, datadir="", **env):
        self.word, self.file = str(uuid.uuid4()), folder / "output"
        self.folder = folder
        env = {**os.environ, "DATADIR": str(datadir), "JOB": self.word, **env}
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

    def processes(self):
        """Return {process: command} of the processes that still run."""
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if self.word.encode() in (folder / "environ").read_bytes():
                    words = (folder / "cmdline").read_text().replace("\0", " ")
                    found[int(folder.name)] = words
            except OSError:  # it has ended meanwhile
                pass
        return found

    def end(self, seconds=200):
        """Wait until all processes have ended; return exit status and output."""
        status = self.process.wait(timeout=seconds)
        for process in self.processes():  # one that is stopped cannot end itself
            os.kill(process, signal.SIGCONT)
        deadline = time.monotonic() + 20
        while self.processes():
            assert time.monotonic() < deadline, self.processes()
            time.sleep(0.1)
        assert not list(self.folder.rglob("*.part"))
        assert not (self.folder / "logs/results.jsonl").exists()
        return status, self.output()


@pytest.fixture
def intro(tmp_path):
    return copy_exercise("dp_ddp_intro", tmp_path)


def start_faulty(folder, launch, name, function, after=0, **env):
    """Start ddp.py with this fault in rank 1, and a long epoch."""
    script = FAULTY.format(name=name, function=function, after=after)
    (folder / "faulty.py").write_text(script)
    env["PYTHONPATH"] = ""  # tests/rules would be where a rank waits
    return Job(["bash", launch, "faulty.py", *LONG_EPOCH], folder, **env)


@each_launch
def test_a_killed_rank_ends_the_job(launch, intro):
    status, output = start_faulty(intro, launch, "SIGKILL", "batch_sums", 2).end()
    assert status == 137, output
    line = "Error: rank 1 was ended by SIGKILL (usually out of memory)\n"
    assert output.count(line) == 1 and "Traceback" not in output


@slow
@each_launch
def test_a_stopped_rank_is_reported_and_the_job_ends(launch, intro):
    """It is silent; rank 0 prints where it waits."""
    limit = {"DDP_TIMEOUT": "40"}
    job = start_faulty(intro, launch, "SIGSTOP", "batch_sums", 5, **limit)
    status, output = job.end()
    assert status == 1, output
    (line,) = re.findall("^.*no step for .*$", output, re.M)
    where = r"at ddp\.py:\d+ (loss\.backward\(\)|sums \+= .*)"
    assert re.fullmatch(rf"rank 0: no step for 2\d s, {where}", line)
    assert output.count("Timeout (0:00:40)!") == 1


@slow
def test_a_rank_stopped_before_the_rendezvous_ends_the_job(intro):
    function, limit = "dist.init_process_group", {"DDP_TIMEOUT": "20"}
    launch = "jobscript_ddp.sh"
    status, output = start_faulty(intro, launch, "SIGSTOP", function, **limit).end()
    assert status == 1 and "Timeout (0:00:20)!" in output, output
    assert "init_process_group" in output


@pytest.mark.parametrize(
    "launch, script",
    [
        pytest.param("run.sh", "pytorch_dvc_cnn_pretrained.py", marks=slow),
        pytest.param(
            *("run-2gpus.sh", "pytorch_dvc_cnn_pretrained_multigpu.py"), marks=slow
        ),
    ],
)
def test_a_hanging_file_system_ends_the_job(launch, script, tmp_path):
    """Opening a FIFO waits for a writer, like a hanging file system."""
    folder = copy_exercise("exercise8", tmp_path)
    photos = tmp_path / "data/dogs-vs-cats"
    photos.mkdir(parents=True)
    os.mkfifo(photos / "train-150.pt")
    command, limit = ["bash", launch, script, *QUICK], {"DDP_TIMEOUT": "15"}
    status, output = Job(command, folder, tmp_path / "data", **limit).end()
    assert status == 1 and output.count("Timeout (0:00:15)!") == 1, output
    assert "in load_prepared" in output


@each_launch
def test_no_rank_outlives_a_killed_launcher(launch, intro):
    job = Job(["bash", launch, "ddp.py", *ENDLESS], intro)
    job.wait_for("Epoch 2: ")
    launchers = [p for p, words in job.processes().items() if "torchrun" in words]
    os.kill(launchers[0], signal.SIGKILL)
    status, output = job.end()
    assert status != 0 and "Epoch 2: " in output


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


def test_a_closed_pipe_ends_the_job(intro):
    command = f"bash jobscript.sh single.py {' '.join(ENDLESS)} | head -n 1"
    done = run(["bash", "-o", "pipefail", "-c", command], intro)
    assert done.returncode == 141 and done.stderr == "", done.stderr
    assert len(done.stdout.splitlines()) == 1


@each_launch
def test_ctrl_c_prints_one_line(launch, intro):
    command = ["bash", launch, "ddp.py", *ENDLESS]
    status, shown = on_terminal(command, intro, stop_at="Epoch 2: ")
    assert status in (130, -signal.SIGINT), shown  # bash ends as its script did
    if "2nodes" not in launch:  # there bash ends both, without a word
        assert shown.count("Stopped by Ctrl-C") == 1, shown
    assert "Traceback" not in shown and "Error" not in shown, shown


@pytest.fixture
def full_disk(intro):
    """Return an exercise whose logs/ is full."""
    (intro / "logs").mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4k", "none", intro / "logs"]
    if os.geteuid() != 0 or subprocess.run(mount).returncode != 0:
        pytest.skip("a full disk needs root, to mount one")
    yield
    subprocess.run(["umount", intro / "logs"])


@pytest.mark.usefixtures("full_disk")
@pytest.mark.parametrize(
    "launch, script",
    [
        ("jobscript.sh", "single.py"),
        pytest.param("jobscript_ddp.sh", "ddp.py", marks=slow),
    ],
)
def test_a_full_disk_prints_one_line(launch, script, intro):
    done = run(["bash", launch, script, *SMALL, "--epochs=1"], intro)
    assert done.returncode == 2, done.stderr
    (line,) = done.stderr.splitlines()
    assert re.match("Error: .*(the disk is full: make|no) room", line)


FAILS = """
import common.cli, torch, torch.distributed as dist

dist.init_process_group()
dist.all_reduce(torch.ones(1, device="cpu"))
if dist.get_rank() == 1:
    raise ValueError("this is it")
dist.all_reduce(torch.ones(1, device="cpu"))
"""


@each_launch
def test_an_error_of_one_rank_is_shown_once(launch, intro):
    """Ranks that have lost their peer are silent."""
    (intro / "fails.py").write_text(FAILS)
    status, output = Job(["bash", launch, "fails.py"], intro).end()
    assert status == 1 and output.count("Traceback") == 1, output
    assert output.count("ValueError: this is it\n") == 1
    assert "peer" not in output and "torch/distributed" not in output


@each_launch
def test_a_user_error_of_all_ranks_is_shown_once(launch, intro):
    done = run(["bash", launch, "ddp.py", "--epochs=0"], intro)
    done.stdout = re.sub("^Nodes: .*\n", "", done.stdout)
    fails(done, "--epochs", "--help lists the options")
    assert not (intro / "logs").exists()


def test_an_infinite_loss_ends_the_run(intro):
    command = [sys.executable, "single.py", *SMALL, "--lr=1000000000"]
    done = run(command, intro)
    fails_line = r"Error: the loss is (nan|inf): use a smaller --lr.*\n"
    assert done.returncode == 2 and re.fullmatch(fails_line, done.stderr)
    assert not (intro / "logs/results.jsonl").exists()


def raise_error(error, cause=None):
    raise error from cause


OTHERS = {
    "out of memory: use a smaller --batch-size": lambda: torch.empty(10**15),
    "BatchNorm needs a last batch of more than": lambda: torch.nn.BatchNorm1d(3)(
        torch.ones(1, 3)
    ),
    "the disk is full: make room": lambda: raise_error(
        OSError(28, os.strerror(28), "x")
    ),
    "PyTorch has no code for this GPU: run `TORCH=cu126": lambda: raise_error(
        RuntimeError("CUDA error: no kernel image is available for execution")
    ),
    "this machine has no network interface of that name": lambda: raise_error(
        RuntimeError("[enforce fail at x] Unable to find address for: nope")
    ),
    "no shared memory is left for NCCL": lambda: raise_error(
        RuntimeError("NCCL WARN Error: failed to extend /dev/shm/nccl-x to 9 bytes")
    ),
    "no shared memory is left: use --workers 0": lambda: raise_error(
        RuntimeError("DataLoader worker (pid 7) exited unexpectedly"),
        RuntimeError("Bus error. It is possible that ... out of shared memory"),
    ),
}


@pytest.mark.parametrize("words", OTHERS)
def test_known_errors_of_libraries_print_one_line(words, capfd):
    try:
        OTHERS[words]()
    except Exception as error:
        with pytest.raises(SystemExit) as ended:
            excepthook(type(error), error, error.__traceback__)
    assert ended.value.code == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith(f"Error: {words}")


@pytest.mark.skipif(os.geteuid() != 0, reason="a full /dev/shm needs root")
def test_workers_without_shared_memory_print_one_line():
    code = (
        "import common.cli, torch; from torch.utils.data import DataLoader; "
        "next(iter(DataLoader(torch.ones(4, 10**6), 4, num_workers=1)))"
    )
    full = 'mount -t tmpfs -o size=64k none /dev/shm && exec "$@"'
    mounted = ["unshare", "--mount", "sh", "-c", full, "-"]
    done = run([*mounted, sys.executable, "-c", code], REPOSITORY)
    # A worker that is killed says so itself (with Python 3.10 after a zero byte).
    lines = done.stderr.replace("\0", "").splitlines()
    (line,) = [
        li for li in lines if not li.startswith("ERROR: Unexpected bus error")
    ]
    assert line.startswith("Error: no shared memory is left: use --workers 0")
    assert done.returncode == 2


SHOWS = "import os, sys; sys.stdout.write(os.environ['MASTER_ADDR'] + '\\n')"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can rename a host")
@each_launch
def test_an_unknown_host_name_is_no_problem(launch, intro):
    """As on some laptops: the processes still meet."""
    (intro / "shows.py").write_text(SHOWS)
    renamed = ["unshare", "--uts", "sh", "-c", 'hostname nowhere && exec "$@"', "-"]
    done = run([*renamed, "bash", launch, "shows.py"], intro)
    assert done.stdout.endswith("127.0.0.1\n127.0.0.1\n"), done.stderr
