"""The page quotes what PyTorch says: each message that a CPU can produce."""

import re
import signal
import socket
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from conftest import REPOSITORY, run
from fork_ranks import free_port
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import WeightedRandomSampler

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
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present as consume
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.serialization import safe_globals
model, norm = torch.nn.Linear(4, 1), torch.nn.BatchNorm1d(4)
state = {f"module.{key}": value for key, value in model.state_dict().items()}
fake = torch.ones(2, 4, requires_grad=True)  # by the generator of a GAN
torch.save(argparse.Namespace(lr=1), "args.pt")

def train():
    model(fake.detach()).sum().backward()
    torch.optim.SGD(model.parameters()).step()

def init(backend="gloo"):
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)

def shards():
    return DTensor.from_local(torch.ones(2), dist.init_device_mesh("cpu", (1,)))

def schedule(epochs, steps, then):
    optimizer = torch.optim.SGD(model.parameters())
    one = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=steps)
    for _ in range(epochs * then):
        optimizer.step()
        one.step()
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

Default process group has not been initialized
DDP(model)
init(); DDP(model)

'DistributedDataParallel' object has no attribute
init(); DDP(model).weight
init(); DDP(model).module.weight

No backend type associated with device type cpu
init("cuda:gloo"); dist.all_reduce(torch.ones(1))
init("cpu:gloo,cuda:gloo"); dist.all_reduce(torch.ones(1))

got mixed torch.Tensor and DTensor
init(); shards() + torch.ones(2)
init(); shards().full_tensor() + torch.ones(2)

Tried to step 5 times. The specified number of total steps is 4
schedule(epochs=2, steps=4, then=3)
schedule(epochs=2, steps=6, then=3)
"""
SAVED_ON_GPU = """
import torch
torch.serialization.register_package(1, lambda _: "cuda:0", lambda *_: None)
torch.save(torch.ones(3), "gpu.pt")
"""
SLOW_SAVE = """
import time
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
rank, model, save = dist.get_rank(), torch.nn.Linear(4, 1), torch.save

def slow_save(*args):
    time.sleep(3)
    save(*args)

torch.save = slow_save
"""
FORKSERVER = """
import multiprocessing
start = multiprocessing.get_context("forkserver").Process

def work():
    pass

"""
KEPT = """
import resource
import torch
from torch.utils.data import DataLoader
resource.setrlimit(resource.RLIMIT_NOFILE, (99, 99))
loader = DataLoader(torch.arange(2000), 4, num_workers=1)
"""
MEET = """
from datetime import timedelta
import torch.distributed as dist
dist.init_process_group("gloo", timeout=timedelta(seconds=2), rank=0, world_size=1)
"""


def end_group():
    if dist.is_initialized():
        dist.destroy_process_group()


def block(heading):
    """Return the Python lines below a heading of the page."""
    section = TEXT.split(f"### {heading}")[1].split("\n### ")[0]
    return re.search("```python\n(.*?)```", section, re.S)[1]


def torchrun(folder, *options, module="run"):
    """Run train.py by PyTorch's own launcher, as the page's readers do."""
    launcher = [sys.executable, "-m", f"torch.distributed.{module}"]
    # The machine may not know its own name; Gloo warns of that.
    launcher.append("--local-addr=127.0.0.1")
    quiet = {"TORCH_CPP_LOG_LEVEL": "ERROR"}
    return run([*launcher, *options, "train.py"], folder, **quiet)


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
    try:
        with pytest.raises(Exception, match=re.escape(message)):
            exec(START + program, {})
        end_group()
        exec(START + fixed, {})
    finally:
        end_group()
    assert message.lower() in PAGE.lower()


class Scale(torch.nn.Module):
    def __init__(self, transposed):
        super().__init__()
        self.weight, self.transposed = (
            torch.nn.Parameter(torch.ones(1, 4)),
            transposed,
        )

    def forward(self, x):
        return self.weight.t() * x.t() if self.transposed else self.weight * x


def test_warning_about_strides():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    torch.set_warn_always(True)  # else once in this process
    message = "Grad strides do not match bucket view strides"
    try:
        ddp_model = DDP(Scale(transposed=True))
        with pytest.warns(UserWarning, match=message):
            ddp_model(torch.ones(2, 4)).sum().backward()
        ddp_model = DDP(Scale(transposed=False))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            ddp_model(torch.ones(2, 4)).sum().backward()
    finally:
        torch.set_warn_always(False)
        end_group()
    assert message in PAGE


def test_weighted_sampler():
    """Without the page's lines each rank draws as many as one GPU."""
    weights, drawn = torch.ones(64), []
    for rank in range(2):
        names = {"WeightedRandomSampler": WeightedRandomSampler, "torch": torch}
        names |= {"seed": 0, "rank": rank, "world_size": 2, "weights": weights}
        exec(block("WeightedRandomSampler: two GPUs"), names)
        drawn.append(list(names["sampler"]))
    assert [len(samples) for samples in drawn] == [32, 32] and drawn[0] != drawn[1]


def test_schedule_of_all_samples():
    """On two GPUs it stops halfway, and nothing says so."""
    rates = []
    for steps in (32, 64):
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], 0.1)
        cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        for _ in range(32):
            optimizer.step()
            cosine.step()
        rates += cosine.get_last_lr()
    assert rates == pytest.approx([0, 0.05])
    assert "two GPUs reach half of the schedule, without a message" in PAGE


@pytest.mark.slow
def test_file_of_rank_0(tmp_path):
    """The page's lines wait for the file; without their barrier rank 1 fails."""
    wait = block("FileNotFoundError or EOFError")
    (tmp_path / "train.py").write_text(
        SLOW_SAVE + wait.replace("dist.barrier()", "")
    )
    done = torchrun(tmp_path, "--standalone", "--nproc-per-node=2")
    assert done.returncode and "FileNotFoundError" in done.stderr
    (tmp_path / "model.pt").unlink(missing_ok=True)
    (tmp_path / "train.py").write_text(SLOW_SAVE + wait)
    done = torchrun(tmp_path, "--standalone", "--nproc-per-node=2")
    assert done.returncode == 0, done.stderr


def test_half_a_file(tmp_path):
    file, message = tmp_path / "half.pt", "failed finding central directory"
    torch.save(torch.ones(9), file)
    file.write_bytes(file.read_bytes()[:700])
    with pytest.raises(RuntimeError, match=message):
        torch.load(file)
    file.write_bytes(b"")
    with pytest.raises(EOFError):
        torch.load(file)
    assert message in PAGE


@pytest.mark.parametrize(
    "message, wrong",
    [
        ("bootstrapping phase", "start(target=work).start()"),
        ("local object", "start(target=(lambda: lambda: 0)()).start()"),
    ],
)
def test_processes_that_are_not_forked(message, wrong, tmp_path):
    """As a DataLoader's workers on Python 3.14. The page names the fixes."""
    file, guard = tmp_path / "train.py", '\nif __name__ == "__main__":\n    '
    file.write_text(FORKSERVER + wrong)
    done = run([sys.executable, file], tmp_path)
    assert message in " ".join(done.stderr.split()) and message in PAGE
    file.write_text(FORKSERVER + guard + "start(target=work).start()")
    done = run([sys.executable, file], tmp_path)
    assert done.returncode == 0 and done.stderr == ""


@pytest.mark.parametrize(
    "program, wrong, right, message",
    [
        (KEPT, "list(loader)", "[b.clone() for b in loader]", "Too many open files"),
        (
            SAVED_ON_GPU,
            "torch.load('gpu.pt')",
            "torch.load('gpu.pt', map_location='cpu')",
            "Attempting to deserialize object on a CUDA device",
        ),
    ],
)
def test_message_of_a_process(program, wrong, right, message, tmp_path):
    done = run([sys.executable, "-c", program + wrong], tmp_path)
    assert done.returncode and message in done.stderr and message in PAGE
    done = run([sys.executable, "-c", program + right], tmp_path)
    assert done.returncode == 0, done.stderr


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


def test_another_torch_hides_ours(tmp_path):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").touch()
    message = "cannot import name 'nn' from 'torch'"
    command = [sys.executable, "-c", "from torch import nn"]
    done = run(command, tmp_path, PYTHONPATH=tmp_path)
    assert message in done.stderr and message in PAGE


def test_too_little_memory_to_import_torch(tmp_path):
    message = "failed to map segment from shared object"
    program = f"ulimit -v 400000; {sys.executable} -c 'import torch'"
    done = run(["bash", "-c", program], tmp_path)
    assert message in done.stderr and message in PAGE


@pytest.mark.parametrize("length, ends", [(75, 0), (76, 1)])
def test_path_of_the_workers_socket(length, ends, tmp_path):
    """The page's limit for TMPDIR. A DataLoader's workers open such a socket."""
    with tempfile.TemporaryDirectory(dir="/tmp") as short:
        folder = Path(short, "x" * (length - len(short) - 1))
        folder.mkdir()
        program = "from multiprocessing import connection\n"
        program += "connection.Listener(family='AF_UNIX')"
        done = run([sys.executable, "-c", program], tmp_path, TMPDIR=folder)
    assert done.returncode == ends
    assert ends == 0 or "AF_UNIX path too long" in done.stderr
    assert "AF_UNIX path too long" in HEADS and "may have at most 75" in PAGE


@pytest.mark.slow
def test_no_compiler(tmp_path):
    message = "No working C++ compiler found in torch._inductor.config.cpp.cxx"
    program = "import torch; torch.compile(torch.sin)(torch.ones(9))"
    done = run([sys.executable, "-c", program], tmp_path, CXX="no-such-compiler")
    assert message in done.stderr and message in PAGE
    assert "InvalidCxxCompiler" in done.stderr and "InvalidCxxCompiler" in PAGE


def test_launcher_of_old_scripts(tmp_path, monkeypatch):
    train = "import argparse; argparse.ArgumentParser().parse_args()"
    (tmp_path / "train.py").write_text(train)
    monkeypatch.delenv("OMP_NUM_THREADS")
    done = torchrun(tmp_path, "--nproc-per-node=2", module="launch")
    banner = "Setting OMP_NUM_THREADS environment variable for each process to be 1"
    unknown = "unrecognized arguments: --local-rank=0"
    for message in (banner, unknown, "ChildFailedError"):
        assert done.returncode and message in done.stderr
        assert message.lower() in PAGE.lower()


def test_ranks_that_python_does_not_set(tmp_path):
    (tmp_path / "train.py").write_text(
        "import torch.distributed as dist; dist.init_process_group('gloo')"
    )
    message = "environment variable RANK expected, but not set"
    done = run([sys.executable, "train.py"], tmp_path)
    assert done.returncode and message in done.stderr and message in PAGE
    assert torchrun(tmp_path, "--standalone").returncode == 0


def test_closed_terminal(tmp_path):
    """torchrun catches SIGHUP itself, so nohup does not help."""
    (tmp_path / "train.py").write_text(
        "import time; print('started', flush=True); time.sleep(60)"
    )
    command = [
        "nohup",
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
    ]
    command += ["--local-addr=127.0.0.1", "train.py"]  # as in torchrun() above
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=tmp_path, stdout=pipe, stderr=pipe) as job:
        assert job.stdout.readline() == b"started\n"
        job.send_signal(signal.SIGHUP)
        _, stderr = job.communicate(timeout=60)
    assert job.returncode and b"got signal: 1" in stderr and "got signal: 1" in PAGE


def test_lost_links(tmp_path):
    """A clone without symbolic links; the page's lines bring them back."""
    made, clone = tmp_path / "made", tmp_path / "clone"
    (made / "exercise8").mkdir(parents=True)
    (made / "common").mkdir()
    (made / "common/env.sh").write_text("echo sourced")
    (made / "exercise8/common").symlink_to("../common")
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b.c"]
    run([*git, "init", "--quiet"], made)
    run([*git, "add", "."], made)
    assert run([*git, "commit", "--quiet", "-m", "a"], made).returncode == 0
    run([*git, "clone", "-q", "-c", "core.symlinks=false", made, clone], tmp_path)
    (heading,) = [head for head in HEADS if "env.sh" in head]
    source = ["bash", "-c", "source common/env.sh"]
    python = [sys.executable, "-c", "import common.data"]
    for command, message in (
        (source, "common/env.sh: Not a directory"),
        (python, "No module named 'common'"),
    ):
        done = run(command, clone / "exercise8")
        assert message in done.stderr and message in heading
    lines = TEXT.split(heading)[1].split("```bash\n")[1].split("```")[0]
    run(["bash", "-c", lines], clone)
    assert run(source, clone / "exercise8").stdout == "sourced\n"
