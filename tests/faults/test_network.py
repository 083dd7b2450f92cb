"""The network between two nodes is cut: for 5 seconds, and for good."""

import os
import re
import subprocess
import sys
import time

import pytest
from conftest import copy_room
from test_two_nodes import ip, nodes, pytestmark  # noqa: F401


@pytest.fixture
def two(nodes, sample, tmp_path):  # noqa: F811
    """Start mnist_ddp.py on both nodes; return the launchers and their outputs."""
    room = copy_room("mnist_multigpu", tmp_path)
    env = {**os.environ, "DATADIR": str(sample), "DDP_TIMEOUT": "30"}
    env |= {"CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": "eth0"}
    del env["PYTHONPATH"]  # tests/rules would be the line at which a rank is
    launch = [sys.executable, "-m", "common.torchrun", "--nnodes=2"]
    launch += ["--nproc-per-node=1", "--rdzv-endpoint=node1:29500"]
    script = ["mnist_ddp.py", "--epochs", "100000"]
    launchers, outputs = [], [tmp_path / "1", tmp_path / "2"]
    for rank, (node, output) in enumerate(zip(nodes, outputs, strict=True)):
        command = [*node, *launch, f"--node-rank={rank}", *script]
        with output.open("w") as out:
            kind = {"cwd": room, "env": env, "stdout": out, "stderr": out}
            launchers.append(subprocess.Popen(command, **kind))
    yield launchers, outputs
    for launcher in launchers:
        launcher.kill()
        launcher.wait()


def epochs(output):
    return len(re.findall(r"^Epoch \d+: ", output.read_text(), re.M))


def await_epochs(number, output, seconds=60):
    deadline = time.monotonic() + seconds
    while epochs(output) < number:
        assert time.monotonic() < deadline, output.read_text()
        time.sleep(0.1)


def second_node(state):
    ip("-n", f"lab{os.getpid()}-2", "link", "set", "eth0", state)


def test_for_five_seconds(two):
    launchers, outputs = two
    await_epochs(2, outputs[0])
    second_node("down")
    time.sleep(5)
    before = epochs(outputs[0])
    second_node("up")
    await_epochs(before + 3, outputs[0])
    assert [launcher.poll() for launcher in launchers] == [None, None]
    assert "Error" not in outputs[0].read_text() + outputs[1].read_text()


def test_for_good(two):
    """Each launcher says where its process waits, and ends."""
    launchers, outputs = two
    await_epochs(2, outputs[0])
    second_node("down")
    status = [launcher.wait(timeout=120) for launcher in launchers]
    assert 0 not in status
    texts = [output.read_text() for output in outputs]
    assert not [t for t in texts if "Traceback" in t], texts
    for rank, text in enumerate(texts):
        waits = rf"^no step for 10 s: rank {rank} at mnist_ddp.py:\d+ `.*`$"
        assert re.search(waits, text, re.M), text
        assert re.search(r"^Error: ", text, re.M), text
