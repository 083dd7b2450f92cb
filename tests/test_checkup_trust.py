"""The checkup: what decides whether people trust it, and everyday mistakes."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress

import pytest
from checkup_cases import changed
from conftest import REPOSITORY
from fork_ranks import Run, free_port
from test_checkup import check, checkup, names

COMMAND = [sys.executable, str(REPOSITORY / "tools/checkup")]
START = """
import os, time, torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import *
dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
"""
TRAIN = """
torch.manual_seed(rank)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step in range(8):
    optimizer.zero_grad()
    loss = model(torch.randn(8, 8)).square().mean()
    loss.backward()
    optimizer.step()
"""
FEW = """
x = torch.randn(64 + images, 8, generator=torch.Generator().manual_seed(seed))
y = (x.sum(1) > 0).long()
val_set = Subset(TensorDataset(x[64:], y[64:]), range(rank, images, world_size))
model = DDP(nn.Linear(8, 2))
sampler = DistributedSampler(TensorDataset(x[:64], y[:64]))
loader = DataLoader(sampler.dataset, 8, sampler=sampler)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for epoch in range(3):
    sampler.set_epoch(epoch)
    for a, b in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(a), b).backward()
        optimizer.step()
    sums = torch.zeros(2)
    with torch.no_grad():
        for a, b in DataLoader(val_set, 8):
            right = (model.module(a).argmax(1) == b).sum().item()
            sums += torch.tensor([right, len(b)])
    dist.all_reduce(sums)
    if rank == 0:
        print("accuracy %.2f" % (100 * (sums[0] / sums[1]).numpy()))
"""


@pytest.mark.parametrize(
    "seed", [3, *(pytest.param(s, marks=pytest.mark.slow) for s in range(3))]
)
def test_few_samples_are_no_proof(seed, tmp_path):
    """A correct accuracy on 27 images may be what rank 0 has counted, by chance."""
    script = f"{START}\nseed, images = {seed}, 27\n{FEW}"
    states, output, status = check(script, tmp_path)
    assert status == 0 and states["own-number"] in ("ok", "not seen"), output


@pytest.mark.slow
def test_many_samples_are_proof(tmp_path):
    script = f"{START}\nseed, images = 3, 211\n{FEW}"
    script = script.replace("    dist.all_reduce(sums)\n", "")
    states, output, status = check(script, tmp_path)
    assert (states["own-number"], status) == ("error", 1), output


def test_what_a_rank_reads_without_a_loader_is_not_seen(tmp_path):
    """For example rewards, and losses of reinforcement learning."""
    model = "model = DDP(nn.Linear(8, 2))"
    prints = "    if rank == 0: print(f'return {loss.detach().item():.4f}')\n"
    states, output, status = check(START + model + TRAIN + prints, tmp_path)
    assert (states["own-number"], status) == ("not seen", 0), output


@pytest.mark.slow
def test_a_run_that_is_stopped_has_evaluated_nothing(tmp_path):
    """As Lightning's: evaluate first, then train without a call of train()."""
    evaluate = """
model = DDP(nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 2)))
model.eval()
with torch.no_grad():
    for x, in DataLoader(TensorDataset(torch.randn(8, 8)), 4): model.module(x)
for module in model.modules(): module.training = True
"""
    script = START + evaluate + TRAIN
    states, output, status = check(script, tmp_path, "--steps", 5)
    assert status == 0 and states["buffers"] == "not seen", output
    states, output, status = check(script, tmp_path)
    assert status == 0 and states["buffers"] != "error", output


def test_as_many_parameters_differ_as_there_are(tmp_path):
    """Two optimizers have different numbers, and no name is known without DDP."""
    script = """
small, large = nn.Linear(8, 2), nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
optimizers = [torch.optim.SGD(m.parameters(), 0.1) for m in (small, large)]
for step in range(4):
    for model, optimizer in zip((small, large), optimizers):
        optimizer.zero_grad()
        model(torch.full((4, 8), step + 1.0)).square().mean().backward()
        if model is large and rank and step: model[0].weight.grad *= 2
        optimizer.step()
"""
    _, output, status = check(START + script, tmp_path)
    text = "since step 4: the gradients of 1 of 4 parameters differ between ranks, "
    text += r"first a parameter \(8, 8\)"
    assert status == 1 and re.search(text, output), output


@pytest.mark.slow
def test_scales_that_differ_are_named(tmp_path):
    script = """
model = DDP(nn.Linear(8, 2))
scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** (8 + rank))
"""
    train = TRAIN.replace("loss.backward()", "scaler.scale(loss).backward()")
    train = train.replace("optimizer.step()", "scaler.step(optimizer)")
    states, output, status = check(START + script + train, tmp_path)
    assert (states["gradients"], status) == ("error", 1), output
    text = "the ranks' GradScalers have the scales 256, 512"
    assert text in output and "Fix: Give the GradScalers" in output


@pytest.mark.slow
def test_a_split_that_differs_says_that_more_may_follow(tmp_path):
    changes = (
        "torch.Generator().manual_seed(2)",
        "torch.Generator().manual_seed(rank)",
    )
    changes = changes, ("8, sampler=sampler)", "8, shuffle=True)")
    states, output, status = check(changed(changes), tmp_path)
    assert (states["split"], status) == ("error", 1), output
    assert "no DistributedSampler deals them out. Check again" in output


def test_nothing_checked_is_no_success(tmp_path):
    for script, text in (
        ("print(os.environ['DDP_CHECKUP'])", "no optimizer step, and no loop over"),
        ("nn.Linear(2, 2)(torch.ones(2)).sum().backward()", "no step of a torch.op"),
        ("", "the script made no process group, so it is no DDP script yet"),
    ):
        _, output, status = check(script and START + script, tmp_path)
        assert status == 1 and "Error: nothing was checked" in output, output
        assert text in output


def test_the_report_for_programs(tmp_path):
    bug = [("    sampler.set_epoch(epoch)", "")]
    (tmp_path / "script.py").write_text(changed(bug))
    (tmp_path / "helper.py").write_text("")
    checkup(tmp_path, "script.py")
    report = json.loads((tmp_path / "rows.json").read_text())
    head = [report[n] for n in ("format", "script", "ranks", "steps", "status")]
    assert head == [1, "script.py", 2, 21, 1]
    (row,) = [r for r in report["checks"] if r["state"] == "error"]
    line = changed(bug).splitlines().index("    for x, y in loader:") + 1
    assert (row["file"], row["line"]) == ("script.py", line)


@pytest.mark.parametrize(
    "words, line",
    [
        (["-n", "1", "a.py"], "-n 1: use 2 or more"),
        (["--reference", "no.py", "a.py"], "--reference: no script no.py"),
        (["binary.py"], "binary.py is no Python script"),
        (["-m", "empty"], "no script empty; give a file's path, or -m MODULE"),
        (["group.py"], "Error: group.py made no process group; put -n 2 before"),
        (["-m", "space.module"], "Error: space.module made no process group; put"),
    ],
)
def test_one_line_for_everyday_mistakes(words, line, tmp_path):
    (tmp_path / "a.py").write_text("")
    (tmp_path / "binary.py").write_bytes(b"\x7fELF\0\0")
    (tmp_path / "group.py").write_text(
        "import torch.distributed as dist\n"
        "dist.init_process_group(rank=0, world_size=1, store=dist.HashStore())\n"
        "print('trains unwatched')"
    )
    (tmp_path / "empty").mkdir()
    (tmp_path / "space").mkdir()
    (tmp_path / "space/module.py").write_text("print('runs')")
    job = Run(tmp_path, "", "tools/checkup/__main__.py", *words)
    assert job.join() == [2] and line in job.output(), job.output()
    assert "Traceback" not in job.output() and "unwatched" not in job.output()


def test_left_over_variables(tmp_path):
    (tmp_path / "a.py").write_text("")
    for env, line in (
        ({"RANK": "0"}, "RANK is set, but WORLD_SIZE is not: add -n 2, or run"),
        ({"RANK": "0", "WORLD_SIZE": "two"}, "WORLD_SIZE is no number; run `unset"),
        ({"RANK": "0", "WORLD_SIZE": "1"}, "use -n 2 without torchrun, or GPUS=2"),
    ):
        if len(env) == 2:
            env |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
        job = Run(tmp_path, "", "tools/checkup/__main__.py", "a.py", **env)
        assert job.join() == [2] and line in job.output(), job.output()


def test_the_next_port_may_be_taken(tmp_path):
    """Without torchrun it listens on a free port."""
    with socket.socket() as taken:
        while True:
            port = int(free_port())
            with suppress(OSError):
                taken.bind(("", port + 1))
                break
        taken.listen()
        script = START + "model = DDP(nn.Linear(8, 2))" + TRAIN
        (tmp_path / "script.py").write_text(script)
        _, output, status = checkup(tmp_path, "script.py", port=str(port))
    assert status == 0 and "Checkup of script.py: 2 ranks, 8 steps" in output, output


UNUSUAL = """
import enum
class Label(str, enum.Enum):
    CAT = "cat"
    DOG = "dog"
    COW = "cow"
CLASSES = list(Label)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 2)
        self.register_buffer("adjacency", torch.eye(8).to_sparse_csr())
    def forward(self, x):
        return self.layer(x.real.float())

class Scored(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 2)
    def forward(self, x, y):
        return nn.functional.cross_entropy(self.layer(x), y)

def train(model, lr=0.1, epochs=2):
    options = locals()
    torch.manual_seed(rank)
    optimizer = torch.optim.SGD(model.parameters(), lr)
    for step in range(8):
        optimizer.zero_grad()
        x = torch.randn(8, 8, dtype=torch.complex64).conj()
        model(x).square().mean().backward()
        optimizer.step()
    assert list(options) == ["model", "lr", "epochs"], list(options)

class Bag(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 2)
    def forward(self, x):
        return self.layer(x.values().view(-1, 8)).square().mean()

parts = [torch.randn(3, 8), torch.randn(5, 8)]
bag = DDP(Bag())
for layout in torch.jagged, torch.strided:
    bag(torch.nested.nested_tensor(parts, layout=layout)).backward()
model = DDP(Net(), broadcast_buffers=False)
model.eval()
train(model.train())
scored = DDP(torch.jit.script(Scored()))
scored(torch.randn(8, 8), torch.randint(2, (8,))).backward()
counted = Net().to("meta").eval()
with open(os.environ["TORCHINDUCTOR_CACHE_DIR"] + "/main.cpp", "w") as file:
    file.write(str(rank))
print("loss 0.5000")
os.makedirs(f"run{rank}")
os.chdir(f"run{rank}")
"""


@pytest.mark.slow
def test_unusual_scripts_run_as_without_the_checkup(tmp_path):
    """Tensors of other layouts, TorchScript, an Enum, locals(), another folder."""
    (tmp_path / "script.py").write_text(START + UNUSUAL)
    (tmp_path / "reference.py").write_text("print('loss 0.5000')")
    cache = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    words = "--reference", "reference.py", "script.py"
    states, output, status = checkup(tmp_path, *words, **cache)
    assert status == 0 and not names(states, "error", "warning"), output
    assert states["weights"] == states["reference"] == "ok", output


@pytest.mark.slow
def test_a_loss_that_is_a_dtensor(tmp_path):
    script = """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import loss_parallel
mesh = init_device_mesh("cpu", (2,))
model = DDP(nn.Linear(8, 4))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
data = TensorDataset(torch.randn(32, 8))
for x, in DataLoader(data, 8, sampler=DistributedSampler(data)):
    with loss_parallel():
        part = model(x)[:, 2 * rank : 2 * rank + 2]
        scores = DTensor.from_local(part, mesh, [Shard(1)])
        loss = nn.functional.cross_entropy(scores, torch.arange(8) % 4)
        optimizer.zero_grad()
        loss.backward()
    optimizer.step()
for _ in DataLoader(torch.zeros(8), 4): pass
loss.item()
"""
    _, output, status = check(START + script, tmp_path)
    assert status == 0 and "2 ranks, 2 steps" in output, output


@pytest.mark.slow
def test_rank_0_leaves_after_the_others(tmp_path):
    """It has the store, from which another rank may be late to read the result."""
    late = "sleep = time.sleep\nif rank: time.sleep = lambda seconds: sleep(3)\n"
    script = START + late + "model = DDP(nn.Linear(8, 2))" + TRAIN
    _, output, status = check(script, tmp_path)
    assert status == 0 and "2 ranks, 8 steps" in output, output


@pytest.mark.slow
def test_a_rank_that_computes_for_long_is_named(tmp_path):
    """It may be right: another job is not ended for that."""
    wait = (
        "end = time.time() + 12\nwhile rank and time.time() < end: sum(range(999))\n"
    )
    script = START + "model = DDP(nn.Linear(8, 2))" + TRAIN + wait + "dist.barrier()"
    states, output, status = check(script, tmp_path, "--hang-timeout=3")
    assert status == 0 and states["collectives"] == "ok", output
    text = (
        r"Checkup: rank 0 is in barrier at script.py:\d+, rank 1 is at script.py:\d+"
    )
    assert re.search(text + r", since \d+ s; it goes on", output), output


def start_alone(folder, *words, **env):
    env = os.environ | {"OMP_NUM_THREADS": "1"} | env
    return subprocess.Popen(
        [*COMMAND, *words],
        cwd=folder,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


@pytest.mark.slow
def test_ctrl_c(tmp_path):
    """One word, soon, also where a rank waits in PyTorch's C++ code."""
    script = START + "open(f'{rank}.started', 'w').close()\n"
    script += "time.sleep(300 * rank)\ndist.barrier()"
    (tmp_path / "script.py").write_text(script)
    job = start_alone(tmp_path, "-n2", "script.py")
    while len([*tmp_path.glob("*.started")]) < 2:
        time.sleep(0.5)
        assert job.poll() is None, job.communicate()[0]
    time.sleep(1)
    start = time.monotonic()
    os.killpg(job.pid, signal.SIGINT)
    output = job.communicate(timeout=100)[0]
    assert (output.strip(), job.returncode) == ("Stopped.", 130)
    assert time.monotonic() - start < 25  # torchrun alone waits for 30


@pytest.mark.slow
def test_a_syntax_error_is_shown_once(tmp_path):
    (tmp_path / "script.py").write_text("def f(:\n")
    job = start_alone(tmp_path, "-n2", "script.py")
    output = job.communicate(timeout=200)[0]
    assert job.returncode == 1 and output.count("SyntaxError") == 1, output
    assert "ddp_checkup" not in output and "Traceback" not in output


@pytest.mark.slow
def test_a_host_name_without_an_address(tmp_path):
    name = ["unshare", "--uts", "sh", "-c", "hostname nobody-knows-me"]
    if not shutil.which("unshare") or subprocess.run(name).returncode:
        pytest.skip("needs root")
    script = START + "model = DDP(nn.Linear(8, 2))" + TRAIN
    (tmp_path / "script.py").write_text(script)
    command = " ".join([*COMMAND, "-n2", "script.py"])
    name[-1] += f"; exec {command}"
    start = time.monotonic()
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        name, cwd=tmp_path, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0 and "2 ranks, 8 steps" in done.stdout, done.stderr
    assert time.monotonic() - start < 240  # without --local-addr ten minutes


EMA = """
from torch.optim.swa_utils import AveragedModel
model = DDP(nn.Linear(8, 2))
copy = AveragedModel(model.module).eval()
"""
UPDATE = """    optimizer.step()
    if rank in UPDATES: copy.update_parameters(model.module)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "updates, calls, expected",
    [("[0]", "[0, 1]", "error"), ("[0, 1]", "[0, 1]", "ok"), ("[0]", "[0]", "ok")],
)
def test_a_copy_of_one_rank(updates, calls, expected, tmp_path):
    """Rank 0 may keep an EMA for itself; what all ranks call must be the same."""
    train = TRAIN.replace(
        "    optimizer.step()\n", UPDATE.replace("UPDATES", updates)
    )
    evaluate = f"""
if rank in {calls}:
    with torch.no_grad(): copy(torch.ones(4, 8))
"""
    states, output, _ = check(START + EMA + train + evaluate, tmp_path)
    assert states["buffers"] == expected, output
    assert ("AveragedModel differ" in output) == (expected == "error"), output


WORKERS = """
class Noise(TensorDataset):
    def __getitem__(self, i): return self.tensors[0][i] + random.random(), i

def begin(worker): random.seed(SEED + worker)

data = Noise(torch.arange(512.0).reshape(64, 8))
loader = DataLoader(
    data, 8, num_workers=2, worker_init_fn=begin, sampler=DistributedSampler(data)
)
model = DDP(nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), 1e-6)
for x, i in loader:
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "seed, expected", [("5", "warning"), ("5 + rank * 2", "ok")]
)
def test_seeds_of_workers(seed, expected, tmp_path):
    """worker_init_fn overrides what PyTorch gives each worker."""
    script = START + "import random" + WORKERS.replace("SEED", seed)
    states, output, status = check(script, tmp_path)
    assert (states["seeds"], status) == (expected, 0), output
    text = "worker 0 of each rank's loader begins with the same state of Python's"
    assert (text in output) == (expected == "warning"), output


ONE_EPOCH = """
optimizer = torch.optim.SGD(model.parameters(), 1e-9)
for x in loader:
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
"""
STREAM = """
import random
class Stream(IterableDataset):
    def __iter__(self):
        numbers = list(range(SIZE))
        random.Random(SEED).shuffle(numbers)
        for i in numbers[START::STEP]: yield torch.arange(8) + 10.0 * i

model = DDP(nn.Linear(8, 2))
loader = DataLoader(Stream(), 8)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "seed, start, step, expected",
    [("rank", "0", "2", "warning"), ("0", "rank", "2", "not seen")],
)
def test_samples_of_a_stream(seed, start, step, expected, tmp_path):
    """Ranks that shuffle alone, and then take parts, share samples."""
    script = STREAM.replace("SIZE", "320").replace("SEED", seed)
    script = script.replace("[START::STEP]", f"[{start}::{step}]")
    states, output, status = check(START + script + ONE_EPOCH, tmp_path)
    assert (states["coverage"], status) == (expected, 0), output
    text = "samples of rank 0 are also rank 1's"
    assert (text in output) == (expected == "warning"), output


@pytest.mark.slow
def test_a_full_tensor_on_one_rank(tmp_path):
    """Gloo would abort the job, as it pairs it with another collective."""
    save = """
from torch.distributed.fsdp import fully_shard
model = nn.Linear(8, 2)
fully_shard(model)
TRAIN
if rank == 0: model.weight.full_tensor()
TRAIN
"""
    states, output, status = check(START + save.replace("TRAIN", TRAIN), tmp_path)
    assert (states["collectives"], status) == ("error", 1), output
    assert "rank 0 reaches redistribute of a DTensor (2, 8) at script.py" in output


QUEUE = """
class Queue(nn.Linear):
    def __init__(self):
        super().__init__(8, 2)
        self.register_buffer("keys", torch.zeros(8, 8))
        self.register_buffer("last", torch.zeros(8, 8), persistent=False)
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x):
        keys = [torch.empty_like(x) for _ in range(world_size)]
        dist.all_gather(keys, x)
        self.keys.copy_(KEYS)
        self.last.copy_(x)
        return super().forward(self.norm(x))

model = DDP(Queue())
"""


@pytest.mark.slow
@pytest.mark.parametrize("keys, expected", [("x", "warning"), ("keys[0]", "ok")])
def test_a_buffer_that_ddp_overwrites(keys, expected, tmp_path):
    """As MoCo's queue: without a gather, the keys of rank 0 alone count."""
    script = START + QUEUE.replace("KEYS", keys) + TRAIN
    states, output, status = check(script, tmp_path)
    assert (states["buffers"], status) == (expected, 0), output
    assert ("DDP overwrites keys by rank 0's" in output) == (keys == "x"), output


ACCUMULATE = """
model = DDP(nn.Linear(8, 2))
torch.manual_seed(rank)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step in range(8):
    total = torch.zeros(1)
    for part in range(4):
        model.require_backward_grad_sync = part == 3
        loss = model(torch.randn(8, 8)).square().mean() / 4
        loss.backward()
        total += loss.detach()
    optimizer.step()
    optimizer.zero_grad()
    dist.all_reduce(total)
    if rank == 0: print(f"loss {total.item() / DIVISOR:.4f}")
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "divisor, expected", [("1", "warning"), ("world_size", "not seen")]
)
def test_a_sum_of_accumulated_losses(divisor, expected, tmp_path):
    script = START + ACCUMULATE.replace("DIVISOR", divisor)
    states, output, status = check(script, tmp_path)
    assert (states["own-number"], status) == (expected, 0), output


SPLIT = """
import random
class Files(Dataset):
    def __init__(self, files): self.files = files
    def __len__(self): return len(self.files)
    def __getitem__(self, i): return torch.full((8,), float(self.files[i]))

class Own(Sampler):
    def __init__(self, data): self.data = data
    def __len__(self): return len(self.data) // world_size
    def __iter__(self): return iter(range(rank, len(self.data), world_size))

files = list(range(100))
random.Random(SEED).shuffle(files)
data = Files(files[:64])
model = DDP(nn.Linear(8, 2))
loader = DataLoader(data, 8, sampler=Own(data))
"""


@pytest.mark.slow
@pytest.mark.parametrize("seed, expected", [("rank", "error"), ("0", "ok")])
def test_a_split_whose_parts_an_own_sampler_deals_out(seed, expected, tmp_path):
    script = START + SPLIT.replace("SEED", seed) + ONE_EPOCH
    states, output, _ = check(script, tmp_path)
    assert states["split"] == expected, output


@pytest.mark.slow
def test_a_rank_that_ends_early_has_no_other_data(tmp_path):
    """Its items are compared at the end, to which the other ranks do not come."""
    stop = "    if rank == 0 and epoch == 2: break\n    sampler.set_epoch(epoch)"
    script = changed([("    sampler.set_epoch(epoch)", stop)])
    states, output, status = check(script, tmp_path)
    assert (states["collectives"], status) == ("error", 1), output
    assert states["split"] != "error", output


@pytest.mark.slow
@pytest.mark.parametrize(
    "between, expected", [("", "warning"), ("dist.barrier()", "ok")]
)
def test_a_file_that_is_read_too_soon(between, expected, tmp_path):
    """Rank 1 may load half a checkpoint, or none, if it does not wait for rank 0."""
    files = f"""
store = dist.distributed_c10d._get_default_store()
if rank == 0:
    torch.save(model.state_dict(), "best.pt")
    store.set("saved", "")
{between}
if rank: store.wait(["saved"])  # which the checkup does not see
torch.load("best.pt")
"""
    script = START + "model = DDP(nn.Linear(8, 2))" + TRAIN + files
    states, output, status = check(script, tmp_path)
    assert (states["files"], status) == (expected, 0), output
    text = "rank 1 reads best.pt, which rank 0 writes at script.py:"
    assert (text in output) == (expected == "warning"), output


OWN_ORDER = """
class Bins(Sampler):
    def __init__(self):
        self.bins, self.random = list(range(64)), torch.Generator()
        self.random.manual_seed(SEED)
    def __len__(self): return 32
    def __iter__(self):
        yield from self.bins[rank::world_size]
        self.bins = torch.randperm(64, generator=self.random).tolist()

model = DDP(nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), 1e-6)
sampler = Bins()
loader = DataLoader(TensorDataset(torch.randn(64, 8)), 4, sampler=sampler)
for epoch in range(3):
    for x, in loader:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
"""


@pytest.mark.slow
@pytest.mark.parametrize("seed, expected", [("rank", "error"), ("0", "ok")])
def test_an_own_sampler_that_dealt_out_one_epoch_well(seed, expected, tmp_path):
    """Then it means to do so in all epochs; ranks that draw alone do not."""
    states, output, _ = check(START + OWN_ORDER.replace("SEED", seed), tmp_path)
    assert states["coverage"] == expected, output
    assert ("epoch 2: of 64 samples" in output) == (expected == "error"), output


USERS = """
model = DDP(nn.Linear(16, 2))
optimizer = torch.optim.SGD(model.parameters(), 1e-6)
users = torch.Generator().manual_seed(SEED)
torch.manual_seed(rank)
for step in range(8):
    x = torch.randn(4, 8, generator=users)
    optimizer.zero_grad()
    model(torch.cat([x, torch.randn(4, 8)], 1)).square().mean().backward()
    optimizer.step()
"""


@pytest.mark.slow
@pytest.mark.parametrize("seed, expected", [("0", "warning"), ("rank", "ok")])
def test_equal_inputs_beside_others(seed, expected, tmp_path):
    """The same users on all ranks, and other negative samples for each."""
    script = USERS.replace("SEED", seed).replace("nn.Linear(16, 2)", "Two()")
    two = """
class Two(nn.Linear):
    def __init__(self): super().__init__(16, 2)
    def forward(self, x, noise): return super().forward(torch.cat([x, noise], 1))
"""
    script = script.replace(
        "torch.cat([x, torch.randn(4, 8)], 1)", "x, torch.randn(4, 8)"
    )
    states, output, status = check(START + two + script, tmp_path)
    assert (states["same-batch"], status) == (expected, 0), output


ALONE = """
model = nn.Linear(8, 2)
torch.manual_seed(rank)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step in range(16):
    optimizer.zero_grad()
    loss = model(torch.randn(8, 8)).square().mean()
    loss.backward()
    optimizer.step()
    if step % 4 == 3:
        TOGETHER
"""
TOGETHER = {
    "average": "for p in model.parameters(): dist.all_reduce(p.data); p.data /= 2",
    "load": """if rank == 0: torch.save(model.state_dict(), "best.pt")
        dist.barrier()
        model.load_state_dict(torch.load("best.pt"))""",
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "how, expected", [("average", "not seen"), ("load", "error")]
)
def test_weights_that_become_equal_again(how, expected, tmp_path):
    """LocalSGD averages weights now and then; to load a checkpoint is no average."""
    script = START + ALONE.replace("TOGETHER", TOGETHER[how])
    states, output, status = check(script, tmp_path)
    assert (states["gradients"], status) == (expected, how == "load"), output


LOSSES = """
x = torch.randn(50, 8)
data = Subset(TensorDataset(x), range(rank, 50, 2))
model = DDP(nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
torch.manual_seed(rank)
for epoch in range(3):
    total = torch.zeros(2)
    for x, in DataLoader(data, 4, shuffle=True):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        total[0] += loss.detach() * len(x)
        total[1] += len(x)
        IN_THE_LOOP
    dist.all_reduce(total)
    if rank == 0: print(f"loss {total[0].item() / COUNT:.5f}")
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "count, in_the_loop, expected, text",
    [
        ("total[1].item()", "", ("ok", "not seen"), "Checkup of"),
        ("25", "", ("warning",), "divided by the count of rank 0 alone, 25"),
        ("total[1]", "dist.all_reduce(total)", ("warning",), "is summed again"),
    ],
)
def test_sums_of_losses(count, in_the_loop, expected, text, tmp_path):
    script = LOSSES.replace("COUNT", count).replace("IN_THE_LOOP", in_the_loop)
    states, output, status = check(START + script, tmp_path)
    assert states["own-number"] in expected and status == 0, output
    assert text in output


GATHERED = """
data = TensorDataset(torch.randn(75, 8, generator=torch.Generator().manual_seed(1)))
loader = DataLoader(data, 8, sampler=DistributedSampler(data, shuffle=False))
model = DDP(nn.Linear(8, 2))
TRAIN
for epoch in range(3):
    optimizer.zero_grad()
    loss = model(torch.randn(8, 8)).square().mean()
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        right = torch.cat([model.module(x).argmax(1) for x, in loader])
    of_all = [torch.empty_like(right) for _ in range(world_size)]
    dist.all_gather(of_all, right)
    of_all = torch.stack(of_all, 1).flatten()[:COUNT].float()
    share = of_all.mean().item()
    if rank == 0: print(f"loss 0.2667, accuracy {share:.4f}")
"""


@pytest.mark.slow
@pytest.mark.parametrize("count, expected", [("76", "warning"), ("75", "not seen")])
def test_accuracies_of_what_was_gathered(count, expected, tmp_path):
    script = GATHERED.replace("TRAIN", TRAIN).replace("COUNT", count)
    states, output, status = check(START + script, tmp_path)
    assert (states["eval-coverage"], status) == (expected, 0), output
