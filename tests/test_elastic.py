"""elastic.py of beyond_ddp: nodes leave and come back.

test_ddp.py tests that it trains as one process does.
"""

import os
import re
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from conftest import REPOSITORY, slow
from fork_ranks import Run, free_port
from record_rank import record

from common.errors import run

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
    module.main = partial(run, module.main)


@pytest.mark.parametrize(
    "ranks, options, patch, words",
    [
        (1, ["--epochs=1"], None, "elastic.pt has 1 epochs; delete it, or .*s 2$"),
        (1, ["--lr=0.1"], None, "other options; use .* --lr 0.3 .*, or delete it"),
        (1, ["--batch-size=6"], None, "other options; use .* --batch-size 12, or"),
        slow(2, ["--batch-size=7"], None, "7 cannot be split .*--batch-size 8"),
        (2, [], read_other_file, "has .1, 0. epochs on ranks 0 to 1; put it on a"),
    ],
)
def test_user_errors(ranks, options, patch, words, saved):
    ended = start(saved, *options, ranks=ranks, patch=patch)
    assert ended.join() == [2] * ranks
    (line,) = re.findall("^Error: .*", ended.output(), re.M)
    assert re.search(words, line), line


def test_a_file_that_is_no_checkpoint(saved):
    """A bare state_dict, and a checkpoint without weights."""
    file = saved / "logs/other.pt"
    whole = torch.load(saved / "logs/elastic.pt")
    for content in (whole["model"], whole | {"model": {}}):
        torch.save(content, file)
        ended = start(saved, f"--checkpoint={file}", ranks=1, patch=None)
        assert ended.join() == [2]
        line = f"Error: {file} is not a checkpoint of this script"
        assert ended.output().count(line) == 1, ended.output()


class Node:
    """torchrun with one process, in this folder; output: the file of its output.

    host: the last number of its address. Nodes are ordered by address, then by PID,
    and PIDs may start from 1 again; only the first node's rank 0 prints.
    """

    def __init__(self, folder, port, options, name, host):
        conf = "last_call_timeout=1,keep_alive_interval=2,keep_alive_max_attempt=3"
        command = [sys.executable, "-m", "common.torchrun", "--nnodes=1:2"]
        command += ["--nproc-per-node=1", "--max-restarts=3", "--rdzv-backend=c10d"]
        command += [f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=elastic"]
        command += [f"--rdzv-conf={conf}", f"--local-addr=127.0.0.{host}"]
        command += [REPOSITORY / SCRIPT, *options]
        self.output = folder / f"{name}.out"
        env = os.environ | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        env["PYTHONPATH"] = f"{REPOSITORY}:{os.environ['PYTHONPATH']}"
        with open(self.output, "w") as out:
            streams = {"stdout": out, "stderr": out, "start_new_session": True}
            self.process = subprocess.Popen(command, cwd=folder, env=env, **streams)

    def wait_for(self, pattern, after=0):
        """Return where the pattern ends in the output, after this position."""
        pattern = re.compile(pattern, re.M)
        while not (found := pattern.search(self.output.read_text(), after)):
            assert self.process.poll() is None, self.output.read_text()
            time.sleep(0.1)
        return found.end()

    def kill(self, sig):
        """Send torchrun a signal; if it is SIGKILL, to its process as well."""
        if sig == signal.SIGKILL:
            pid = str(self.process.pid)
            subprocess.run(["pkill", "-KILL", "-P", pid], check=True)
        self.process.send_signal(sig)
        self.process.wait(60)


@pytest.mark.slow
@pytest.mark.parametrize("sig", [signal.SIGKILL, signal.SIGINT])
def test_a_node_leaves_and_comes_back(sig, tmp_path):
    """All epochs are trained, with one process or two.

    One is trained again if a node comes after it was printed and before it is saved.
    """
    options = *TINY, "--lr=0.0003", "--sequences=3072", "--epochs=999"
    add, nodes = partial(Node, tmp_path, free_port(), options), []
    try:
        nodes.append(first := add("first", 1))
        at = first.wait_for("^Epoch 2:", first.wait_for("^elastic on 1 x"))
        nodes.append(second := add("second", 2))
        at = first.wait_for("^Epoch ", first.wait_for("^elastic on 2 x", at))
        second.kill(sig)
        at = first.wait_for("^Epoch ", first.wait_for("^elastic on 1 x", at))
        nodes.append(add("again", 3))
        at = first.wait_for("^Epoch ", first.wait_for("^elastic on 2 x", at))
    finally:
        for node in reversed(nodes):
            node.kill(signal.SIGTERM)
    text, trained = first.output.read_text(), []
    for part in re.split("^elastic on ", text, flags=re.M):
        numbers = [int(n) for n in re.findall(r"^Epoch (\d+):", part, re.M)]
        trained += numbers[1:] if numbers[:1] == trained[-1:] else numbers
    assert trained == [*range(1, len(trained) + 1)]
    assert set(re.findall("^Batch size: .* = (.*)", text, re.M)) == {"12"}
