"""The page quotes what PyTorch says: each message that a CPU can produce."""

import re
import socket
import sys

import pytest
from conftest import REPOSITORY, free_port, run

PAGE = (REPOSITORY / "docs/TROUBLESHOOTING.md").read_text()
HEADS = re.findall("^### (.*)", PAGE, re.M)
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
        BODY

dist.init_process_group("gloo")
model = DDP(Net(), find_unused_parameters=FIND)
for step in range(2):
    model(torch.randn(2, 4, requires_grad=True)).sum().backward()
"""
CHECKPOINT = "return checkpoint(self.second, self.first(x), use_reentrant=REENTRANT)"
UNUSED = "return self.first(x)"
READY = "Expected to mark a variable ready only once"
FINISHED = "Expected to have finished reduction in the prior iteration"
PREFIX = """
import torch
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present as consume
model, state = torch.nn.Linear(2, 2), {}
for key, value in model.state_dict().items():
    state[f"module.{key}"] = value
try:
    model.load_state_dict(state)
finally:
    consume(state, "module.")
    print(model.load_state_dict(state))
"""
WORKER = """
import torch
from torch.utils.data import DataLoader
images = [torch.zeros(3, 224, 224)] * 32
for batch in DataLoader(images, batch_size=16, num_workers=WORKERS):
    pass
print("all read")
"""
CELL = """
import torch.multiprocessing as mp
def train(rank): pass
mp.spawn(train, nprocs=2)
"""


def python(program, *before):
    done = run([*before, sys.executable, "-c", program], REPOSITORY)
    return done.returncode, done.stdout + done.stderr


def torchrun(folder, *options):
    """Run train.py by PyTorch's own launcher, as the page's readers do."""
    launcher = [sys.executable, "-m", "torch.distributed.run"]
    return run([*launcher, *options, "train.py"], folder)


def two_ranks(tmp_path, body, find="False"):
    program = TWO_RANKS.replace("BODY", body).replace("FIND", find)
    (tmp_path / "train.py").write_text(program)
    done = torchrun(tmp_path, "--standalone", "--nproc-per-node=2")
    return done.returncode, done.stdout + done.stderr


def test_unused_parameter(tmp_path):
    status, output = two_ranks(tmp_path, UNUSED)
    assert status and FINISHED in output and FINISHED in HEADS
    assert two_ranks(tmp_path, UNUSED, find="True")[0] == 0  # what the page advises


def test_gradient_that_comes_twice(tmp_path):
    reentrant = CHECKPOINT.replace("REENTRANT", "True")
    status, output = two_ranks(tmp_path, reentrant, find="True")
    assert status and READY in output and READY in HEADS
    fixed = CHECKPOINT.replace("REENTRANT", "False")
    assert two_ranks(tmp_path, fixed, find="True")[0] == 0


def test_port_in_use(tmp_path):
    (tmp_path / "train.py").write_text("")
    with socket.create_server(
        ("", 0), family=socket.AF_INET6, dualstack_ipv6=True
    ) as other:
        taken = torchrun(tmp_path, f"--master-port={other.getsockname()[1]}")
        free = [
            torchrun(tmp_path, "--standalone"),
            torchrun(tmp_path, f"--master-port={free_port()}"),
        ]
    assert taken.returncode and "address already in use" in taken.stderr
    assert "Address already in use" in HEADS
    assert [done.returncode for done in free] == [0, 0]


def test_state_of_the_wrapper():
    status, output = python(PREFIX)
    assert status and 'Unexpected key(s) in state_dict: "module.weight"' in output
    assert "<All keys matched successfully>" in output
    assert "consume_prefix_in_state_dict_if_present(state" in PAGE
    assert 'Missing key(s) in state_dict, Unexpected key(s): "module."' in HEADS


@pytest.mark.skipif(
    run(["unshare", "-m", "true"], "/").returncode != 0, reason="only root can mount"
)
def test_shared_memory_that_is_too_small():
    mount = 'mount -t tmpfs -o size=1m tmpfs /dev/shm && exec "$@"'
    small = ["unshare", "-m", "bash", "-c", mount, "bash"]
    message = "unable to allocate shared memory(shm)"
    status, output = python(WORKER.replace("WORKERS", "1"), *small)
    assert status and message in output and f"`{message}`" in PAGE
    status, output = python(WORKER.replace("WORKERS", "0"), *small)
    assert (status, output) == (0, "all read\n")


def test_processes_from_a_notebook():
    """A cell's functions are in no file, as those of `python -c`."""
    status, output = python(CELL)
    message = re.search("Can't get attribute 'train' on <module '__main__'", output)
    assert status and message
    head = message[0].replace("<", "").replace("__", r"\_\_")
    assert head in HEADS
