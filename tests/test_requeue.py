"""cinic_requeue.py: stopped by a signal, it goes on as if it had never been."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
from conftest import REPOSITORY, copy_room
from conftest import run as run_command
from ranks import Run
from test_checkpoint import equal
from test_checkpoint import load as read

sys.path.append(str(REPOSITORY / "tests/slurm"))
import test_slurm
from test_slurm import cluster, finish, info, processes, sbatch, slurm  # noqa: F401

SCRIPT, BATCH = "cinic_requeue.py", ("--batch-size", 12, "--lr", 0.01)
# 100 images, 2 processes: 5 steps of 12 in an epoch, the last smaller.
OPTIONS = "--epochs", 3, "--log-interval", 1, *BATCH
RESUME = *OPTIONS, "--resume", "checkpoint.pth.tar"
MANY = "--epochs", 12
STOPPED = "Stopped, and saved in checkpoint.pth.tar"


def on_slurm(test):
    for mark in test_slurm.pytestmark:
        test = mark(test)
    return test


def room_in(folder):
    folder.mkdir(exist_ok=True)
    return copy_room("cinic_lab", folder)


def note(module, rank):
    """Print which images a process trains on: seen EPOCH [..]."""
    dataset = sys.modules["common.data"].InMemory
    pick, epoch = dataset.__getitems__, [0]
    train = module.train

    def picks(self, indices):
        if epoch[0]:
            print("seen", epoch[0], indices)
        return pick(self, indices)

    def trains(args, model, state, *rest):
        epoch[0] = state.epoch + 1
        train(args, model, state, *rest)
        epoch[0] = 0

    dataset.__getitems__, module.train = picks, trains


def seen(text):
    """Return {epoch: the images that a process trained on}."""
    found = {}
    for epoch, images in re.findall(r"^seen (\d) \[(.*)\]$", text, re.M):
        found.setdefault(int(epoch), []).extend(map(int, images.split(",")))
    return found


def await_line(run, line):
    deadline = time.monotonic() + 120
    while line not in run.output():
        assert time.monotonic() < deadline and run.alive(), run.output()
        time.sleep(0.01)


def stop(run, line, rank):
    """Signal one process once it has printed a line; return what all said."""
    await_line(run, line)
    os.kill(run.processes[rank].pid, signal.SIGUSR1)
    assert run.join() == [85, 85], run.output()
    assert run.output().count(STOPPED) == 1 and STOPPED not in run.output(1)
    return [run.output(rank) for rank in (0, 1)]


@pytest.fixture(scope="module")
def undisturbed(sample, tmp_path_factory):
    """What a run of cinic_ddp.py leaves, which nobody stopped, and says."""
    room = copy_room("cinic_lab", tmp_path_factory.mktemp("whole"))
    run = Run(room, sample, "cinic_ddp.py", *OPTIONS, ranks=2, patch=note)
    assert run.join() == [0, 0], run.output()
    return read(room), [run.output(rank) for rank in (0, 1)]


def shown(text):
    """Return the means that were printed, without the times."""
    lines = re.findall(r"^Epoch: (\S+)  .*  (Loss .*)$| (\* Acc.*)$", text, re.M)
    return list(dict.fromkeys(lines))


def test_stopped_three_times(undisturbed, sample, tmp_path):
    """In the first steps, in the last step of an epoch, and once in the middle."""
    room, said = room_in(tmp_path / "a"), ["", ""]
    options = OPTIONS
    for line, rank in (("[1][2/5]", 1), ("[2][1/5]", 0), ("[3][3/5]", 1)):
        run = Run(room, sample, SCRIPT, *options, ranks=2, patch=note)
        options = RESUME
        said = [a + b for a, b in zip(said, stop(run, line, rank), strict=True)]
    assert read(room)["so_far"][0] > 0 and not list(room.glob("*.part"))
    run = Run(room, sample, SCRIPT, *RESUME, ranks=2, patch=note)
    assert run.join() == [0, 0], run.output()
    said = [text + run.output(rank) for rank, text in enumerate(said)]
    whole, its_said = undisturbed
    for one, other in zip(said, its_said, strict=True):
        assert seen(one) == seen(other)  # each batch, in the same order
        assert shown(one) == shown(other)  # and the means of the whole epoch
    for epoch in (1, 2, 3):
        both = seen(said[0])[epoch] + seen(said[1])[epoch]
        assert sorted(both) == list(range(100))
    now = read(room)
    assert now.pop("dealt") == (2, 12, 1) and whole["dealt"] is None
    assert equal(now, {name: whole[name] for name in now})


def signalled_after(batch, module, rank):
    """Signal rank 1 after so many batches, before the ranks agree."""
    means, calls = module.means, []

    def counts(*args):
        calls.append(1)
        if len(calls) == batch and rank == 1:
            os.kill(os.getpid(), signal.SIGUSR1)
        return means(*args)

    module.means = counts


@pytest.mark.parametrize("batch", [1, 5])
def test_stopped_after_the_first_and_the_last_batch(
    batch, undisturbed, sample, tmp_path
):
    room, patch = room_in(tmp_path / "a"), partial(signalled_after, batch)
    run = Run(room, sample, SCRIPT, *OPTIONS, ranks=2, patch=patch)
    assert run.join() == [85, 85], run.output()
    assert read(room)["so_far"][0] == batch
    run = Run(room, sample, SCRIPT, *RESUME, ranks=2)
    assert run.join() == [0, 0], run.output()
    assert all(equal(read(room)[n], undisturbed[0][n]) for n in ("model", "random"))


@pytest.mark.parametrize(
    "script, ranks, options",
    [
        ("cinic_ddp.py", 2, []),  # it would train on the first images again
        (SCRIPT, 1, []),
        (SCRIPT, 2, ["--batch-size", 10]),
        (SCRIPT, 2, ["--seed", 2]),
    ],
)
def test_the_rest_must_be_the_rest_of_the_same_order(
    script, ranks, options, stopped, sample, tmp_path
):
    room = room_in(tmp_path / "a")
    shutil.copy(stopped, room)
    run = Run(room, sample, script, *RESUME, *options, ranks=ranks)
    assert run.join() == [2] * ranks, run.output()
    words = (
        "go on with cinic_requeue.py, on 2 processes, with --batch-size 12 --seed 1"
    )
    assert words in run.output() and "Traceback" not in run.output()


@pytest.fixture(scope="module")
def stopped(sample, tmp_path_factory):
    """Return a checkpoint from within an epoch."""
    room = copy_room("cinic_lab", tmp_path_factory.mktemp("stopped"))
    patch = partial(signalled_after, 1)
    run = Run(room, sample, SCRIPT, *OPTIONS, ranks=2, patch=patch)
    assert run.join() == [85, 85], run.output()
    return room / "checkpoint.pth.tar"


def start(command, room, sample, **env):
    """Start a command whose output goes to a file; return both."""
    out = room / "out"
    env = {**os.environ, "DATADIR": str(sample), **env}
    with out.open("a") as file:
        to = {"stdout": file, "stderr": subprocess.STDOUT}
        process = subprocess.Popen(list(map(str, command)), cwd=room, env=env, **to)
    return process, out


def await_text(file, text, seconds=120):
    deadline = time.monotonic() + seconds
    while not (file.exists() and text in file.read_text()):
        assert time.monotonic() < deadline, file.exists() and file.read_text()
        time.sleep(0.05)


def test_the_run_script_without_slurm(undisturbed, sample, tmp_path):
    room = room_in(tmp_path / "a")
    command = ["bash", "run-requeue.sh", SCRIPT, *OPTIONS]
    process, out = start(command, room, sample)
    await_text(out, "Epoch: [2][1/5]")
    process.send_signal(signal.SIGUSR1)
    assert process.wait(60) == 85, out.read_text()
    said = out.read_text()
    assert STOPPED in said and "Traceback" not in said
    assert said.endswith("type this again, with --resume checkpoint.pth.tar\n")
    process, out = start([*command, *RESUME[-2:]], room, sample)
    assert process.wait(120) == 0, out.read_text()
    assert equal(read(room)["model"], undisturbed[0]["model"])


def ranks_of(folder):
    """Return the processes that run the script in this folder, by their rank."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            words = (process / "environ").read_bytes().split(b"\0")
            env = dict(w.decode().split("=", 1) for w in words if b"=" in w)
            if (process / "cwd").readlink() == folder and "LOCAL_RANK" in env:
                found[int(env["RANK"])] = int(process.name)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_torchrun_starts_a_killed_rank_again(rank, undisturbed, sample, tmp_path):
    room = room_in(tmp_path / "a")
    command = [sys.executable, "-m", "common.torchrun", "--standalone"]
    command += ["--nproc-per-node=2", "--max-restarts=3", SCRIPT, *OPTIONS]
    # Else the new ranks look for the old ones: PyTorch's issue 135712.
    env = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    process, out = start(command, room, sample, **env)
    await_text(out, "Epoch: [2][1/5]")
    os.kill(ranks_of(room)[rank], signal.SIGKILL)
    assert process.wait(120) == 0, out.read_text()
    said = out.read_text()
    assert said.count("Epoch: [1][1/5]") == 1, said
    assert equal(read(room)["model"], undisturbed[0]["model"])


@pytest.mark.slow
def test_one_that_comes_back_finds_its_own_and_is_done(sample, tmp_path):
    """Another run has saved since. A signal may come when all epochs are done."""
    room = room_in(tmp_path / "a")
    few = ["--epochs", 1, *BATCH]
    torchrun = [sys.executable, "-m", "common.torchrun", "--nproc-per-node=2"]
    torchrun += ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]
    seven = [*torchrun, "--rdzv-id=7", SCRIPT, *few]
    assert run_command(seven, room, sample).returncode == 0
    (own,) = room.glob("logs/*/checkpoint.pth.tar")
    other = [sys.executable, "cinic.py", *few]
    assert run_command(other, room, sample).returncode == 0
    assert not (room / "checkpoint.pth.tar").samefile(own)
    again = run_command(seven, room, sample, SLURM_RESTART_COUNT="1")
    assert again.returncode == 0 and again.stderr == "", again.stderr
    assert "has all epochs: nothing is left to do" in again.stdout
    assert (room / "checkpoint.pth.tar").samefile(own)
    assert len((room / "logs/results.jsonl").read_text().splitlines()) == 2


@pytest.fixture(scope="module")
def many_epochs(sample, tmp_path_factory):
    """The weights of 12 epochs that nobody stopped."""
    room = copy_room("cinic_lab", tmp_path_factory.mktemp("many"))
    run = Run(room, sample, "cinic_ddp.py", *OPTIONS, *MANY, ranks=2)
    assert run.join() == [0, 0], run.output()
    return read(room)


def scontrol(*words):
    done = run_command(["scontrol", *words], "/")
    assert done.returncode == 0, done.stderr


def started_again(job, times):
    """Wait until a job is back in the queue, and let it start at once."""
    deadline = time.monotonic() + 100
    while info(job)["JobState"] != "PENDING" or info(job)["Restarts"] != str(times):
        assert time.monotonic() < deadline, (times, str(info(job)))
        time.sleep(0.2)
    while processes(job):  # or the old script's end is taken for the new one's
        assert time.monotonic() < deadline, processes(job)
        time.sleep(0.2)
    time.sleep(2)
    scontrol("update", f"jobid={job}", "starttime=now")  # it would wait two minutes


def ended(job, seconds):
    state, output = finish(job, seconds)
    assert (state["JobState"], state["ExitCode"]) == ("COMPLETED", "0:0"), output
    assert "Traceback" not in output, output
    return output


@on_slurm
def test_a_job_is_stopped_in_three_ways(sbatch, many_epochs, sample, tmp_path):  # noqa: F811
    """By a signal, by scontrol requeue, and by a node that fails."""
    room = room_in(tmp_path / "a")
    job = sbatch(room, "run-requeue.sh", SCRIPT, *map(str, [*OPTIONS, *MANY]))
    out = room / f"slurm-{job}.out"
    await_text(out, "Epoch: [2][2/5]")
    run_command(["scancel", "--signal=USR1", "--batch", job], "/")
    await_text(out, STOPPED)
    started_again(job, 1)
    await_text(out, "Epoch: [4][2/5]")
    scontrol("requeue", str(job))
    started_again(job, 2)
    await_text(out, "Epoch: [6][2/5]")
    try:
        scontrol("update", "nodename=n2", "state=down", "reason=test")
        started_again(job, 3)
    finally:
        # Slurm may have found out by itself that it is well.
        run_command(["scontrol", "update", "nodename=n2", "state=resume"], "/")
    output = ended(job, 120)
    assert output.count(STOPPED) == 1
    assert equal(read(room)["model"], many_epochs["model"])
    assert equal(read(room)["random"], many_epochs["random"])


@on_slurm
def test_a_time_limit_of_a_minute(sbatch, many_epochs, sample, tmp_path):  # noqa: F811
    """It saves before the limit, and comes back with a minute more."""
    room = room_in(tmp_path / "a")
    row, sleep = "        waited +=", "        time.sleep(1.2)\n"
    slow = (room / SCRIPT).read_text().replace(row, sleep + row)
    (room / SCRIPT).write_text(slow)  # 12 epochs of 5 steps: 72 s in all
    limit = "--time=1", "--signal=B:USR1@10"  # which may come 60 s earlier than that
    words = map(str, [*OPTIONS, *MANY])
    job = sbatch(room, *limit, "run-requeue.sh", SCRIPT, *words)
    times, deadline = 1, time.monotonic() + 300
    while (state := info(job))["JobState"] in ("RUNNING", "PENDING", "COMPLETING"):
        assert time.monotonic() < deadline, str(state)
        if state["Restarts"] == str(times):  # mostly some 25 s after each start
            started_again(job, times)
            times += 1
        time.sleep(0.5)
    output = ended(job, 120)
    assert STOPPED in output and "TIME LIMIT" not in output
    assert equal(read(room)["model"], many_epochs["model"])
