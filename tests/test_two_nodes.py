"""Part 5 of cinic_lab by hand: the commands of its README, on two nodes.

Each node is a network namespace. They share a cable, and nothing else of a network.
"""

import json
import os
import re
import shutil
import subprocess

import pytest
from conftest import REPOSITORY, copy_room, run

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can make networks"),
    pytest.mark.cluster,
    pytest.mark.skipif(not shutil.which("ip"), reason="no ip: apt install iproute2"),
]


def ip(*words):
    done = run(["ip", *words], "/")
    assert done.returncode == 0, done.stderr


@pytest.fixture
def nodes(tmp_path):
    """Return what to type before a command to run it on node1, and on node2."""
    names = [f"lab{os.getpid()}-{n}" for n in (1, 2)]
    hosts = tmp_path / "hosts"
    hosts.write_text("127.0.0.1 localhost\n10.78.0.1 node1\n10.78.0.2 node2\n")
    # What a node calls itself; its own /etc/hosts.
    enter = 'mount --bind "$1" /etc/hosts && hostname $2 && shift 2 && exec "$@"'
    try:
        for name in names:
            ip("netns", "add", name)
        eth0 = ["name", "eth0", "netns"]
        ip("link", "add", *eth0, names[0], "type", "veth", "peer", *eth0, names[1])
        for n, name in enumerate(names, start=1):
            ip("-n", name, "address", "add", f"10.78.0.{n}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                ip("-n", name, "link", "set", device, "up")
        isolated = "unshare", "--uts", "--mount", "sh", "-c", enter, "sh", str(hosts)
        yield [
            ["ip", "netns", "exec", name, *isolated, f"node{n}"]
            for n, name in enumerate(names, start=1)
        ]
    finally:
        for name in names:
            left = run(["ip", "netns", "pids", name], "/").stdout.split()
            if left:
                run(["kill", "-9", *left], "/")
            run(["ip", "netns", "delete", name], "/")


def commands():
    """Return the three fences of "By hand": for both nodes, node1, and node2."""
    text = (REPOSITORY / "cinic_lab/README.md").read_text()
    section = text.split("### By hand")[1].split("\n## ")[0]
    mark = "<!-- needs another machine -->\n```bash\n"
    blocks = [part.split("```")[0] for part in section.split(mark)[1:]]
    assert len(blocks) == 3 and "--node-rank=1" in blocks[2]
    return blocks


def test_the_commands_of_the_readme(nodes, sample, tmp_path):
    room = copy_room("cinic_lab", tmp_path)
    both, *each = commands()
    env = {**os.environ, "DATADIR": str(sample), "CUDA_VISIBLE_DEVICES": ""}
    pipe, processes = subprocess.PIPE, []
    for node, command in zip(nodes, each, strict=True):
        script = f"source common/env.sh\n{both}\n{command}"
        processes.append(
            subprocess.Popen(
                [*node, "bash", "-c", script],
                cwd=room,
                env=env,
                stdout=pipe,
                stderr=pipe,
                text=True,
            )
        )
    outputs = [process.communicate(timeout=180) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    first, second = (output for output, _ in outputs)
    assert len(re.findall(r"^ \* Acc@1", first, re.M)) == 3
    assert second == ""
    (result,) = map(json.loads, (room / "logs/results.jsonl").open())
    assert (result["gpus"], result["batch"]) == (2, 256)
    assert "Warning" not in outputs[0][1] + outputs[1][1], outputs
