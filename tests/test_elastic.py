"""elastic.py of beyond_ddp: it continues on any number of processes.

test_ddp.py tests that it trains as one process does.
"""

import re
import sys
from pathlib import Path

import pytest
import torch
from conftest import copy_exercise, run
from record_training import record
from run_ranks import Run
from test_faults import Job

TINY = "--layers=2 --width=32 --heads=4 --length=16 --lr=0.3 --sequences=48"
TINY = (*TINY.split(), "--batch-size=12")
SCRIPT = "beyond_ddp/elastic.py"


def start(folder, *options, ranks, script=SCRIPT, patch=record, **more):
    return Run(folder, "", script, *TINY, *options, ranks=ranks, patch=patch, **more)


def test_it_continues_on_any_number_of_processes(tmp_path):
    """With the losses of one process that was never stopped, momentum included."""
    single, seen = "dp_ddp_intro/single.py", []
    (alone,) = start(tmp_path, "--epochs=6", ranks=0, script=single).results()
    for ranks, epochs in (2, 2), (1, 3), (3, 6):
        first, *others = start(tmp_path, f"--epochs={epochs}", ranks=ranks).results()
        assert all(other["means"] == first["means"] for other in others)
        seen += first["means"]
    for its, ours in zip(seen, alone["means"], strict=True):
        assert its == pytest.approx(ours, rel=1e-4)


def name_own_file(module, rank):
    sys.argv.append(f"--checkpoint=logs/{rank}.pt")


def test_rank_0_saves_and_replaces_the_file(tmp_path):
    """No other rank does, though each of two nodes has a local rank 0."""
    more, logs = {"patch": name_own_file, "per_node": 1}, tmp_path / "logs"
    assert start(tmp_path, "--epochs=1", ranks=2, **more).join() == [0, 0]
    assert [file.name for file in logs.glob("*.pt")] == ["0.pt"]
    (logs / "old.pt").hardlink_to(logs / "0.pt")
    assert start(tmp_path, "--epochs=2", ranks=1, **more).join() == [0]
    epochs = [torch.load(logs / name)["epoch"] for name in ("old.pt", "0.pt")]
    assert epochs == [1, 2]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Return a folder with the checkpoint of an epoch."""
    folder = tmp_path_factory.mktemp("saved")
    assert start(folder, "--epochs=1", ranks=1, patch=None).join() == [0]
    return folder


def read_other_file(module, rank):
    """Make rank 1 find no checkpoint, as on a node with a disk of its own."""
    exists = Path.exists
    Path.exists = lambda path: rank == 0 and exists(path)


@pytest.mark.parametrize(
    "ranks, options, patch, words",
    [
        (1, ["--epochs=1"], None, "elastic.pt has 1 epochs; delete it, or .*s 2$"),
        (1, ["--batch-size=6"], None, "other options; use .* --batch-size 12, or"),
        (2, ["--batch-size=7"], None, "7 cannot be split .*--batch-size 8"),
        (2, [], read_other_file, "has .1, 0. epochs on ranks 0 to 1; put it on a"),
        (1, ["--checkpoint=logs/results.jsonl"], None, "is not a checkpoint of"),
    ],
)
def test_user_errors(ranks, options, patch, words, saved):
    ended = start(saved, *options, ranks=ranks, patch=patch)
    assert ended.join() == [2] * ranks
    (line,) = re.findall("^Error: .*", ended.output(), re.M)
    assert re.search(words, line), line


@pytest.mark.slow
def test_torchrun_restarts_it_after_a_kill(tmp_path):
    """Each epoch is trained once, or twice if the kill came before it was saved."""
    copy_exercise("dp_ddp_intro", tmp_path)
    elastic = copy_exercise("beyond_ddp", tmp_path)
    command = [sys.executable, "-m", "common.torchrun", "--standalone"]
    command += ["--nproc-per-node=2", "--max-restarts=1", "elastic.py", *TINY]
    command += ["--lr=0.0003", "--sequences=3072", "--epochs=4"]
    job = Job(command, elastic, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
    job.wait_for("Epoch 2:")
    run(["pkill", "-KILL", "--newest", "--parent", job.process.pid], "/")
    status, output = job.end()
    trained = re.findall(r"^Epoch (\d):", output, re.M)
    assert status == 0 and output.count("elastic on 2 x") == 2, output
    assert {*trained} == {*"1234"} and len(trained) <= 5, output
