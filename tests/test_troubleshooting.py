"""The page quotes what PyTorch says: messages that a CPU can produce.

Each program ends with its message, and as the page advises it ends well.
"""

import re
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from conftest import REPOSITORY, run
from torch.utils.data import WeightedRandomSampler

pytestmark = pytest.mark.slow
TEXT = (REPOSITORY / "docs/TROUBLESHOOTING.md").read_text()
PAGE = " ".join(TEXT.split())
START = """
import argparse, multiprocessing, os, resource, sys, time
from datetime import timedelta
import torch
import torch.distributed as dist
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present as consume
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.serialization import safe_globals
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

model, norm = torch.nn.Linear(4, 1), torch.nn.BatchNorm1d(4)
state = {f"module.{key}": value for key, value in model.state_dict().items()}
torch.save(argparse.Namespace(lr=1), "args.pt")

def init(backend="gloo"):
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)

def save_on_gpu():
    torch.serialization.register_package(1, lambda _: "cuda:0", lambda *_: None)
    torch.save(torch.ones(3), "gpu.pt")

def listen(port):
    return dist.TCPStore("localhost", port, is_master=True, wait_for_workers=False)

def load_batches():
    resource.setrlimit(resource.RLIMIT_NOFILE, (99, 99))
    return DataLoader(torch.arange(2000), 4, num_workers=1)

def start(target):  # as a DataLoader's worker on Python 3.14
    process = multiprocessing.get_context("forkserver").Process(target=target)
    process.start()
    process.join()
    sys.exit(process.exitcode)

def work():
    pass

def meet(address="localhost"):
    os.environ |= {"MASTER_ADDR": address, "MASTER_PORT": "0"}
    wait = timedelta(seconds=2)
    dist.init_process_group("gloo", timeout=wait, rank=0, world_size=1)

class Net(torch.nn.Module):
    def __init__(self, reentrant=None):
        super().__init__()
        self.first, self.second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
        self.reentrant = reentrant
    def forward(self, x):
        if self.reentrant is None:
            return self.first(x)
        return checkpoint(self.second, self.first(x), use_reentrant=self.reentrant)

def get_rank():
    dist.init_process_group("gloo")
    return dist.get_rank()

def two_steps(net, find):
    get_rank()
    ddp_model = DDP(net, find_unused_parameters=find)
    for step in range(2):
        ddp_model(torch.randn(2, 4, requires_grad=True)).sum().backward()
"""


def block(heading):
    """Return the Python lines below a heading of the page."""
    section = TEXT.split(f"### {heading}")[1].split("\n### ")[0]
    return re.search("```python\n(.*?)```", section, re.S)[1]


def here(program):
    try:
        exec(START + program, {})
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def alone(program, *launcher):
    Path("train.py").write_text(START + program)
    done = run([sys.executable, *launcher, "train.py"], ".")
    return done.stderr if done.returncode else None


def on_two_ranks(program):
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    program += "\nos._exit(0)"  # Gloo's threads may abort Python's own exit
    return alone(program, *launcher, "--local-addr=127.0.0.1")


SLOW_DISK = block("FileNotFoundError or EOFError").replace(
    "torch.save(", "time.sleep(3); torch.save("
)
START += f"saves_and_loads = {SLOW_DISK!r}\n"
# For each kind of run: a message, a program that ends so, and as the page advises.
CASES = {
    here: """
Unexpected key(s)
model.load_state_dict(state)
consume(state, "module."); model.load_state_dict(state)

Weights only load failed
torch.load("args.pt")
with safe_globals([argparse.Namespace]): torch.load("args.pt")

Expected more than 1 value per channel when training
norm(torch.ones(1, 4))
norm(torch.ones(2, 4))

Default process group has not been initialized
DDP(model)
init(); DDP(model)

'DistributedDataParallel' object has no attribute
init(); DDP(model).weight
init(); DDP(model).module.weight

No backend type associated with device type cpu
init("cuda:gloo"); dist.all_reduce(torch.ones(1))
init("cpu:gloo,cuda:gloo"); dist.all_reduce(torch.ones(1))

Address already in use
store = listen(0); listen(store.port)
store = listen(0); listen(0)
""",
    alone: """
Attempting to deserialize object on a CUDA device
save_on_gpu(); torch.load("gpu.pt")
save_on_gpu(); torch.load("gpu.pt", map_location="cpu")

Too many open files
list(load_batches())
[batch.clone() for batch in load_batches()]

bootstrapping phase
start(work)
if __name__ == "__main__": start(work)

gai error: -2 - Name or service
meet(address="n" * 64)
meet()

Unable to find address for: eth7
os.environ["GLOO_SOCKET_IFNAME"] = "eth7"; meet()
meet()
""",
    on_two_ranks: """
environment variable RANK expected, but not set
del os.environ["RANK"]; dist.init_process_group("gloo")
dist.init_process_group("gloo")

finished reduction in the prior
two_steps(Net(), find=False)
two_steps(Net(), find=True)

only once
two_steps(Net(reentrant=True), find=True)
two_steps(Net(reentrant=False), find=True)

FileNotFoundError
rank = get_rank(); exec(saves_and_loads.replace("dist.barrier()", ""))
rank = get_rank(); exec(saves_and_loads)
""",
}


@pytest.mark.parametrize(
    "run_it, message, wrong, right",
    [
        (how, *lines.splitlines())
        for how, cases in CASES.items()
        for lines in cases.strip().split("\n\n")
    ],
)
def test_message_and_advice(run_it, message, wrong, right, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert message.lower() in PAGE.lower()
    assert message.lower() in " ".join(run_it(wrong).split()).lower()
    (tmp_path / "model.pt").unlink(missing_ok=True)
    assert run_it(right) is None


def test_the_sampler_of_the_page_draws_another_share_on_each_rank():
    weights, drawn = torch.ones(64), []
    for rank in range(2):
        names = {"WeightedRandomSampler": WeightedRandomSampler, "torch": torch}
        names |= {"seed": 0, "rank": rank, "world_size": 2, "weights": weights}
        exec(block("WeightedRandomSampler: two GPUs"), names)
        drawn.append(list(names["sampler"]))
    assert [len(samples) for samples in drawn] == [32, 32] and drawn[0] != drawn[1]
