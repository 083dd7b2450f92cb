"""The checkup: what is healthy is well; what is sick has its own promise broken."""

import json
import re

import pytest
import torch
from conftest import REPOSITORY, copy_exercise, load, run
from fork_ranks import Run

NAMES = [name for name, _, _ in load("clinic", "promises").TEXTS]
DEVICE = "each process has a device of its own"  # cannot be seen on CPUs

# In plain PyTorch, as people write it; what is sick or odd changes some of its rows.
SCRIPT = """
import os, random, helper, numpy as np
import torch, torch.distributed as dist
from contextlib import nullcontext
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import *
rank, local_rank = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
dist.init_process_group()
world_size = dist.get_world_size()
torch.manual_seed(0)
images = torch.randn(130, 8, generator=torch.Generator().manual_seed(1))
data = TensorDataset(images, (images.sum(1) > 0).long())
train_set, val_set = random_split(data, [101, 29], torch.Generator().manual_seed(2))
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
ddp_model = DDP(model)
torch.manual_seed(rank)
sampler = DistributedSampler(train_set)
loader = DataLoader(train_set, 8, sampler=sampler)
val_loader = DataLoader(Subset(val_set, range(rank, 29, world_size)), 8)
optimizer = torch.optim.SGD(model.parameters(), 0.1, 0.9)
def evaluate():
    sums = torch.zeros(2)
    with torch.no_grad():
        for x, y in val_loader:
            right = (model(x).argmax(1) == y).sum()
            sums += torch.stack([right, torch.tensor(len(y))])
    dist.all_reduce(sums)
    return sums[0].item() / sums[1].item()
for epoch in range(3):
    sampler.set_epoch(epoch)
    total = torch.zeros(2)
    for x, y in loader:
        x = x + 0.1 * torch.randn_like(x)
        loss = nn.functional.cross_entropy(ddp_model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += torch.stack([loss.detach() * len(y), torch.tensor(len(y))])
    dist.all_reduce(total)
    total = (total[0] / total[1]).item()
    accuracy = evaluate()
    if rank == 0:
        print(f"Epoch {epoch}: loss {total:.4f}, accuracy {accuracy:.3f}")
if rank == 0:
    torch.save(model.state_dict(), "model.pt")
dist.destroy_process_group()
"""
# Of each: the promise that is broken, what is replaced (-), and by what (+).
SICK = """
all start from the same weights
-ddp_model = DDP(model)
+ddp_model = model
-torch.manual_seed(0)
+torch.manual_seed(rank)
-        loss.backward()
+        loss.backward()
+        for p in model.parameters(): dist.all_reduce(p.grad, dist.ReduceOp.AVG)

gradients are averaged
-ddp_model = DDP(model)
+ddp_model = model

gradients are averaged
-ddp_model = DDP(model)
+model[0].requires_grad_(False)
+ddp_model = DDP(model)
+model[0].requires_grad_(True)

gradients are averaged
-cross_entropy(ddp_model(x), y)
+cross_entropy(model(x), y)

gradients are averaged
-        loss = nn
+        with ddp_model.no_sync(): loss = nn

all have the same weights after each step
-0.1, 0.9
+0.1 + rank, 0.9

each image goes to one process, none is left out
-DistributedSampler(train_set)
+DistributedSampler(train_set, world_size, 0)

each image goes to one process, none is left out
-8, sampler=sampler
+8, shuffle=True

each epoch has an order of its own
-    sampler.set_epoch(epoch)

all split the data alike
-manual_seed(1)
+manual_seed(rank)

all split the data alike
-manual_seed(2)
+manual_seed(rank)

processes draw different random numbers
-torch.manual_seed(rank)
+torch.manual_seed(0)

evaluation counts each sample once
-Subset(val_set, range(rank, 29, world_size)), 8
+val_set, 8, sampler=DistributedSampler(val_set)

evaluation counts each sample once
-world_size)), 8
+world_size)), 8, drop_last=True

all take part in each collective
-    accuracy = evaluate()
-    if rank == 0:
+    if rank == 0:
+        accuracy = evaluate()

all take part in each collective
-    dist.all_reduce(total)
+    if rank == 0 or epoch < 2: dist.all_reduce(total)

all take part in each collective
-    dist.all_reduce(total)
+    dist.broadcast(total, rank)

one process writes each file
-if rank == 0:
-    torch.save
+if True:
+    torch.save

one process writes each file
-sampler = DistributedSampler
+log = open("log.txt", "a")
+sampler = DistributedSampler

a step does not wait for the device
-        total +=
+        loss.item()
+        total +=

the printed numbers are the whole job's
-    dist.all_reduce(sums)

the printed numbers are the whole job's
-    dist.all_reduce(total)

the group is ended
-dist.destroy_process_group()
"""
# Of each: what is another style, and which promises cannot be seen then (?).
HEALTHY = """
each has a set of its own, which it shuffles
?each image goes to one process, none is left out
?all split the data alike
-DataLoader(train_set, 8, sampler=sampler)
+DataLoader(TensorDataset(*[t[rank:100:2] for t in train_set[:]]), 8, shuffle=True)

NumPy draws the items
-sampler = DistributedSampler
+class Noise(TensorDataset):
+    def __getitem__(self, i):
+        return torch.tensor(np.random.randn(8)).float(), super().__getitem__(i)[1]
+train_set = Noise(*train_set[:])
+sampler = DistributedSampler

workers draw the items
-sampler = DistributedSampler
+class Noise(TensorDataset):
+    def __getitem__(self, i): return torch.randn(8), super().__getitem__(i)[1]
+train_set = Noise(*train_set[:])
+sampler = DistributedSampler
-0.1 * torch.randn_like(x)
+0
-8, sampler
+8, num_workers=1, sampler

collectives of other kinds, and of a part of the processes
-    total = (
+    if rank == 0: dist.gather(total, [torch.zeros(2), torch.zeros(2)])
+    else: dist.gather(total, dst=0)
+    alone = dist.new_group([0])
+    if rank == 0: dist.all_reduce(total.clone(), group=alone)
+    dist.all_gather_object([None] * 2, torch.ones(rank))
+    if rank == 0: dist.broadcast(total, 0)
+    else: dist.broadcast(total, 0)
+    dist.barrier()
+    total = (

a sampler that goes on for ever
?each image goes to one process, none is left out
-loader = DataLoader(train_set, 8, sampler=sampler)
+class Forever(Sampler):
+    def __iter__(self):
+        sampler.set_epoch(epoch)
+        while True: yield from sampler
+loader = DataLoader(train_set, 8, sampler=Forever())
-    for x, y in loader:
+    for x, y in __import__("itertools").islice(loader, 7):

all arguments are given
-init_process_group()
+init_process_group(backend="gloo")
-DDP(model)
+DDP(model, device_ids=None)
-8, sampler=sampler
+8, sampler=sampler, num_workers=1, persistent_workers=True

a batch sampler
-8, sampler=sampler
+batch_sampler=BatchSampler(sampler, 8, False)

a share by Subset
-train_set, 8, sampler=sampler
+Subset(train_set, range(rank, 101, 2)), 8, shuffle=True

the last batch is dropped
-8, sampler=sampler
+8, sampler=sampler, drop_last=True

nothing is shuffled
?each epoch has an order of its own
-DistributedSampler(train_set)
+DistributedSampler(train_set, shuffle=False)

one epoch
?each epoch has an order of its own
-range(3)
+range(1)

nothing is random
?processes draw different random numbers
-0.1 * torch.randn_like(x)
+0
-torch.manual_seed(rank)
+torch.manual_seed(0)

items are drawn again and again
?each image goes to one process, none is left out
-8, sampler=sampler
+8, sampler=WeightedRandomSampler(torch.ones(101), 50)

a stream
?each image goes to one process, none is left out
?each epoch has an order of its own
?all split the data alike
-loader = DataLoader(train_set, 8, sampler=sampler)
+class Stream(IterableDataset):
+    def __iter__(self): return iter([train_set[i] for i in range(rank, 100, 2)])
+loader = DataLoader(Stream(), 8)

a time is printed
-loss {total:.4f}, accuracy {accuracy:.3f}
+12.345 s

each evaluates all
?the printed numbers are the whole job's
-Subset(val_set, range(rank, 29, world_size))
+val_set
-    dist.all_reduce(sums)

a scaler
-        loss.backward()
+        scaler.scale(loss).backward()
-optimizer.step()
+scaler.step(optimizer); scaler.update()
-sampler = DistributedSampler
+scaler = torch.GradScaler("cpu")
+sampler = DistributedSampler

gradients of two passes are added
-        loss.backward()
+        with ddp_model.no_sync(): (ddp_model(x).sum() * 0).backward()
+        (0 * ddp_model(x).sum() + loss).backward()

a number is read in some steps
-        total +=
+        if epoch == 1: loss.item()
+        total +=

each writes its own file
-sampler = DistributedSampler
+open(f"log{rank}.txt", "w")
+sampler = DistributedSampler

gradients are averaged by hand
-ddp_model = DDP(model)
+ddp_model = model
-        loss.backward()
+        loss.backward()
+        for p in model.parameters(): dist.all_reduce(p.grad, dist.ReduceOp.AVG)
"""


def read_cases(text):
    """Return (title, promises that cannot be seen, changes) of each case."""
    cases = []
    for block in text.strip("\n").split("\n\n"):
        title, *lines = block.splitlines(keepends=True)
        unseen = {line[1:].strip() for line in lines if line[0] == "?"}
        rows = "".join(line for line in [*lines, "\n"] if line[0] != "?")
        found = re.findall(r"((?:^-.*\n)+)((?:^\+.*\n)*)", rows, re.M)
        changes = [tuple(map(without_marks, change)) for change in found]
        cases.append(pytest.param(title.strip(), unseen, changes, id=title.strip()))
    return cases


def without_marks(lines):
    return "\n".join(line[1:] for line in lines.splitlines())


def changed(changes):
    script = SCRIPT
    for old, new in changes:
        assert old in script, old
        script = script.replace(old, new)
    return script


def checkup(script, folder, *options, per_node=2):
    """Return the status of a run under the checkup, {promise: state}, its output."""
    if isinstance(script, str):
        (folder / "script.py").write_text(script)
        (folder / "helper.py").write_text("")  # both write its __pycache__
        script = "script.py"
    command = ["clinic/checkup.py", "--json=rows.json", *options, script]
    run = Run(folder, "", *command, ranks=2, per_node=per_node)
    status, file = max(run.join()), folder / "rows.json"
    rows = json.loads(file.read_text()) if file.exists() else []
    states = {row["promise"]: row["state"] for row in rows}
    return status, states, run.output(0) + run.output(1)


def those(states, state):
    return {name for name, found in states.items() if found == state}


@pytest.mark.parametrize("promise, unseen, changes", read_cases(SICK))
def test_what_is_sick(promise, unseen, changes, tmp_path):
    status, states, said = checkup(changed(changes), tmp_path)
    assert those(states, "broken") == {promise}, said
    assert status == 1
    line = r"script\.py:\d+|no process|rank"
    assert re.search(f"{re.escape(promise)} +broken\n    .*({line})", said), said


@pytest.mark.parametrize("style, unseen, changes", read_cases(HEALTHY))
def test_what_is_healthy(style, unseen, changes, tmp_path):
    status, states, said = checkup(changed(changes), tmp_path)
    assert (status, those(states, "broken")) == (0, set()), said
    assert those(states, "not seen") == {DEVICE, *unseen}, said


def test_it_changes_nothing_and_ends_early(tmp_path):
    """A run under it has the weights of one without, to the bit."""
    status, states, said = checkup(SCRIPT, tmp_path)
    assert status == 0 and those(states, "kept") == {*NAMES} - {DEVICE}, said
    watched = torch.load(tmp_path / "model.pt")
    assert Run(tmp_path, "", tmp_path / "script.py", ranks=2).join() == [0, 0]
    alone = torch.load(tmp_path / "model.pt")
    assert all(torch.equal(alone[name], watched[name]) for name in alone)
    (tmp_path / "model.pt").unlink()
    status, states, said = checkup(SCRIPT, tmp_path, "--steps", 5)
    assert status == 0 and "2 processes, 5 steps" in said, said
    assert not (tmp_path / "model.pt").exists()
    unseen = "evaluation counts each sample once", "the group is ended"
    assert those(states, "not seen") > {*unseen}, said


def test_a_script_that_trains_nothing(tmp_path):
    status, states, said = checkup("print('bye')", tmp_path)
    assert status == 0 and not those(states, "broken"), said


def test_a_script_that_fails_or_needs_a_gpu(tmp_path):
    fails = ("    accuracy = evaluate()", "    accuracy = evaluate()[rank]")
    status, states, said = checkup(changed([fails]), tmp_path)
    assert status == 1 and not those(states, "broken"), said
    assert "TypeError: 'float' object is not subscriptable" in said
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    for by_name in (
        'init_process_group("nccl")',
        # Both are connected: else the one that ends first resets the other.
        "init_process_group(); dist.barrier(); torch.ones(1).cuda()",
    ):
        script = changed([("init_process_group()", by_name)])
        status, _, said = checkup(script, tmp_path)
        line = "Error: script.py: no GPU is here, and it asks for one by name ("
        assert status == 2 and said.startswith(line), said
        assert "Traceback" not in said


def test_it_says_how_to_start_it(tmp_path):
    line = "Error: run bash run-2gpus.sh checkup.py SCRIPT.py\n"
    (tmp_path / "script.py").write_text("")
    for script, ranks in (("no.py", 2), ("script.py", 0)):
        run = Run(tmp_path, "", "clinic/checkup.py", script, ranks=ranks)
        assert {*run.join()} == {2} and run.output() == line
    run = Run(tmp_path, "", "clinic/checkup.py", "--help")
    assert run.join() == [0]
    assert all(name in " ".join(run.output().split()) for name in NAMES)


INTRO = "--layers=1 --width=16 --heads=2 --length=8 --sequences=64 --epochs=2"


def test_it_is_started_by_a_run_script_of_another_exercise(tmp_path):
    exercise = copy_exercise("dp_ddp_intro", tmp_path)
    copy_exercise("clinic", tmp_path)
    command = "bash jobscript_ddp.sh ../clinic/checkup.py ddp.py --batch-size=8"
    done = run([*command.split(), *INTRO.split()], exercise)
    assert done.returncode == 0, done.stderr
    assert "Checkup of ddp.py: 2 processes, 8 steps" in done.stdout


BREAKS = {
    1: "each epoch has an order of its own",
    2: "processes draw different random numbers",
    3: "gradients are averaged",
    4: "all split the data alike",
    5: "each image goes to one process, none is left out",
    6: "one process writes each file",
    7: "all take part in each collective",
    8: "all take part in each collective",
}


@pytest.mark.parametrize(
    "number",
    [1, 2, 5, 8, *(pytest.param(n, marks=pytest.mark.slow) for n in (3, 4, 6, 7))],
)
def test_patients(number, tmp_path):
    """Each has one promise broken, and its solution has none."""
    clinic = REPOSITORY / "clinic"
    per_node = 1 if number == 5 else 2  # it is well on one node
    for folder, broken in (
        (clinic, {BREAKS[number]}),
        (clinic / "solutions", set()),
    ):
        script = folder / f"patient{number}.py"
        status, states, said = checkup(script, tmp_path, per_node=per_node)
        assert those(states, "broken") == broken, said
        assert status == len(broken)
    if number == 5:
        status, _, said = checkup(clinic / "patient5.py", tmp_path)
        assert status == 0, said


@pytest.mark.parametrize(
    "single, state, why",
    [
        ("single.py --batch-size 8", "kept", "of its first loss apart"),
        ("single.py --lr 0.1", "broken", "of its first loss apart"),
        ("single.py --heads 3", "broken", "single.py failed, see above"),
    ],
)
def test_losses_against_those_of_one_gpu(single, state, why, tmp_path):
    exercise = copy_exercise("dp_ddp_intro", tmp_path)
    command = ["clinic/checkup.py", "--against", single, "--tolerance", 0.02]
    command += ["ddp.py", "--batch-size=4", *INTRO.split()]
    run = Run(exercise, "", *command, ranks=2)
    assert run.join() == [state == "broken"] * 2, run.output()
    row = rf"^the losses are those of one GPU +{state}\s+.*{why}"
    assert re.search(row, run.output(), re.M), run.output()
