"""The page quotes what PyTorch says: each message that a CPU can produce."""

import re
import socket
import sys

import pytest
from conftest import REPOSITORY, free_port, run

TEXT = (REPOSITORY / "docs/TROUBLESHOOTING.md").read_text()
PAGE, HEADS = " ".join(TEXT.split()), re.findall("^### (.*)", TEXT, re.M)
TWO_RANKS = """
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
    def forward(self, x):
        {body}

dist.init_process_group("gloo")
model = DDP(Net(), find_unused_parameters={find})
for step in range(2):
    model(torch.randn(2, 4, requires_grad=True)).sum().backward()
"""
UNUSED = {"find": False, "body": "return self.first(x)"}
FOUND = UNUSED | {"find": True}
CHECKPOINT = "return checkpoint(self.second, self.first(x), use_reentrant={})"
TWICE = {"find": True, "body": CHECKPOINT.format(True)}
ONCE = {"find": True, "body": CHECKPOINT.format(False)}
START = """
import argparse, torch
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present as consume
from torch.serialization import safe_globals
model, norm = torch.nn.Linear(4, 1), torch.nn.BatchNorm1d(4)
state = {f"module.{key}": value for key, value in model.state_dict().items()}
fake = torch.ones(2, 4, requires_grad=True)  # by the generator of a GAN
torch.save(argparse.Namespace(lr=1), "args.pt")

def train():
    model(fake.detach()).sum().backward()
    torch.optim.SGD(model.parameters()).step()
"""
# What is printed, a program that ends so, and the program as the page advises.
PROGRAMS = """
Unexpected key(s)
model.load_state_dict(state)
consume(state, "module."); model.load_state_dict(state)

modified by an inplace operation
verdict = model(fake); train(); verdict.sum().backward()
train(); verdict = model(fake); verdict.sum().backward()

Weights only load failed
torch.load("args.pt")
with safe_globals([argparse.Namespace]): torch.load("args.pt")

Expected more than 1 value per channel when training
norm(torch.ones(1, 4))
norm(torch.ones(2, 4))
"""
MEET = """
from datetime import timedelta
import torch.distributed as dist
dist.init_process_group("gloo", timeout=timedelta(seconds=2), rank=0, world_size=1)
"""


def torchrun(folder, *options, module="run"):
    """Run train.py by PyTorch's own launcher, as the page's readers do."""
    launcher = [sys.executable, "-m", f"torch.distributed.{module}"]
    return run([*launcher, *options, "train.py"], folder)


@pytest.mark.slow
@pytest.mark.parametrize(
    "message, wrong, right",
    [("finished reduction in the prior", UNUSED, FOUND), ("only once", TWICE, ONCE)],
)
def test_message_of_two_ranks(message, wrong, right, tmp_path):
    (tmp_path / "train.py").write_text(TWO_RANKS.format(**wrong))
    done = torchrun(tmp_path, "--standalone", "--nproc-per-node=2")
    assert done.returncode and message in done.stderr and message in PAGE
    (tmp_path / "train.py").write_text(TWO_RANKS.format(**right))
    assert torchrun(tmp_path, "--standalone", "--nproc-per-node=2").returncode == 0


def test_port_in_use(tmp_path):
    (tmp_path / "train.py").write_text("")
    with socket.create_server(("", 0)) as other:
        taken = torchrun(tmp_path, f"--master-port={other.getsockname()[1]}")
        assert torchrun(tmp_path, "--standalone").returncode == 0
    assert taken.returncode and "address already in use" in taken.stderr
    assert "Address already in use" in HEADS


@pytest.mark.parametrize("lines", PROGRAMS.strip().split("\n\n"))
def test_message_of_a_program(lines, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    message, program, fixed = lines.splitlines()
    with pytest.raises(Exception, match=re.escape(message)):
        exec(START + program, {})
    exec(START + fixed, {})
    assert message.lower() in PAGE.lower()


@pytest.mark.parametrize(
    "variable, value, message",
    [
        ("MASTER_ADDR", "n" * 64, "gai error: -2 - Name or service"),
        ("GLOO_SOCKET_IFNAME", "eth7", "Unable to find address for: eth7"),
    ],
)
def test_message_of_a_setting(variable, value, message, tmp_path):
    env = {"MASTER_ADDR": "localhost", "MASTER_PORT": free_port(), variable: value}
    done = run([sys.executable, "-c", MEET], tmp_path, **env)
    assert done.returncode and message in done.stderr and message in PAGE


def test_launcher_of_old_scripts(tmp_path, monkeypatch):
    train = "import argparse; argparse.ArgumentParser().parse_args()"
    (tmp_path / "train.py").write_text(train)
    monkeypatch.delenv("OMP_NUM_THREADS")
    done = torchrun(tmp_path, "--nproc-per-node=2", module="launch")
    banner = "Setting OMP_NUM_THREADS environment variable for each process to be 1"
    for message in (banner, "unrecognized arguments: --local-rank=0"):
        assert done.returncode and message in done.stderr
        assert message.lower() in PAGE.lower()
