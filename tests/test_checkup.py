"""The checkup: nothing is said of a healthy script, and each bug has its own row.

test_checkup_programs.py tries programs as others write them.
"""

import json
import re

import pytest
import torch
from fork_ranks import Run


def read_report(folder):
    """Return {name of a check: its state}."""
    file = folder / "rows.json"
    rows = json.loads(file.read_text()) if file.exists() else []
    return {row["name"]: row["state"] for row in rows}


def names(states, *wanted):
    return {name for name, state in states.items() if state in wanted}


def checkup(folder, *words, ranks=2, **job):
    """Return (states, output, status) of a script under the checkup."""
    path = "clinic/../tools/checkup/__main__.py"  # as in ../tools/checkup
    command = path, "--json=rows.json", *words
    job = Run(folder, "", *command, ranks=ranks, **job)
    status = max(job.join())
    return read_report(folder), job.output(0) + job.output(1), status


# Plain PyTorch. The cases below change some of its lines.
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
images = torch.randn(230, 8, generator=torch.Generator().manual_seed(1))
data = TensorDataset(images, (images.sum(1) > 0).long())
train_set, val_set = random_split(data, [101, 129], torch.Generator().manual_seed(2))
norm = nn.BatchNorm1d(8)
model = nn.Sequential(norm, nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
ddp_model = DDP(model)
torch.manual_seed(rank)
sampler = DistributedSampler(train_set)
loader = DataLoader(train_set, 8, sampler=sampler)
val_loader = DataLoader(Subset(val_set, range(rank, 129, world_size)), 8)
optimizer = torch.optim.SGD(model.parameters(), 0.1, 0.9)
def evaluate():
    model.eval()
    for buffer in model.buffers(): dist.broadcast(buffer, 0)
    sums = torch.zeros(2)
    with torch.no_grad():
        for x, y in val_loader:
            right = (model(x).argmax(1) == y).sum()
            sums += torch.stack([right, torch.tensor(len(y))])
    model.train()
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
        print(f"Epoch {epoch}: loss {total:.4f}, accuracy {accuracy:.4f}")
if rank == 0:
    torch.save(model.state_dict(), "model.pt")
dist.destroy_process_group()
"""
# Without DTensors and without clipping.
UNSEEN = {"shards", "clipping"}
# Of each: the check that fails, its level, what is replaced (-), and by what (+).
BUGS = """
start
-ddp_model = DDP(model)
+ddp_model = model
-torch.manual_seed(0)
+torch.manual_seed(rank)
-        loss.backward()
+        loss.backward()
+        for p in model.parameters(): dist.all_reduce(p.grad, dist.ReduceOp.AVG)

gradients
-ddp_model = DDP(model)
+model[0].requires_grad_(False)
+ddp_model = DDP(model)
+model[0].requires_grad_(True)

gradients
-cross_entropy(ddp_model(x), y)
+cross_entropy(model(x), y)

unused-parameters
-model = nn.Sequential(norm, nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
+class Net(nn.Sequential):
+    def forward(self, x): return self[2](self[0](x).relu())
+model = Net(nn.Linear(8, 16), nn.Linear(1, 1), nn.Linear(16, 2))

weights
-0.1, 0.9
+0.1 + rank, 0.9

coverage
-DistributedSampler(train_set)
+DistributedSampler(train_set, world_size, 0)

coverage
-8, sampler=sampler
+8, shuffle=True

set-epoch
-    sampler.set_epoch(epoch)

split
-manual_seed(2)
+manual_seed(rank)

seeds warning
-torch.manual_seed(rank)
+torch.manual_seed(0)

eval-coverage warning
-Subset(val_set, range(rank, 129, world_size)), 8
+val_set, 8, sampler=DistributedSampler(val_set)

eval-coverage warning
-world_size)), 8
+world_size)), 8, drop_last=True

collectives
-    accuracy = evaluate()
-    if rank == 0:
+    if rank == 0:
+        accuracy = evaluate()

collectives
-    dist.all_reduce(total)
+    dist.broadcast(total, rank)

collectives
-    accuracy = evaluate()
+    accuracy = evaluate()
+    if rank and epoch: break

collectives
-    for x, y in loader:
+    for x, y in [*loader][rank:]:

files
-if rank == 0:
-    torch.save
+if True:
+    torch.save

files warning
-sampler = DistributedSampler
+log = open("log.txt", "a")
+sampler = DistributedSampler

host-sync advice
-        total +=
+        loss.item()
+        total +=

own-number
-    dist.all_reduce(sums)

own-number warning
-    dist.all_reduce(total)

gradients
-SGD(model.parameters()
+SGD(nn.Linear(8, 2).parameters()

gradients
-        loss = nn
+        for _ in range(rank): torch.ones(1, requires_grad=True).sum().backward()
+        loss = nn

gradients warning
-ddp_model = DDP(model)
+ddp_model, other = DDP(model), DDP(nn.Linear(8, 2))

buffers
-    for buffer in model.buffers(): dist.broadcast(buffer, 0)

buffers warning
-sampler = DistributedSampler
+centre = nn.Module()
+centre.register_buffer("mean", torch.zeros(8))
+centre.to("cpu")
+sampler = DistributedSampler
-        total +=
+        centre.mean.mul_(0.9).add_(x.mean(0))
+        total +=

split
-sampler = DistributedSampler
+class Files(TensorDataset):
+    files = property(lambda self: self.names)
+train_set = Files(*train_set[:])
+train_set.names = [f"{i}.jpg" for i in random.sample(range(101), 101)]
+sampler = DistributedSampler

eval-coverage warning
-Subset(val_set, range(rank, 129, world_size)), 8
+val_set, 8, sampler=DistributedSampler(val_set)
-    dist.all_reduce(sums)
+    parts = [torch.zeros(2) for _ in range(world_size)]
+    dist.all_gather(parts, sums)
+    sums = sum(parts)
+    print(f"{sums[1]:.0f} images")
"""
# Of each: what is another style, and which checks cannot be seen then (?).
HEALTHY = """
each has a set of its own, which it shuffles
?coverage
?split
-DataLoader(train_set, 8, sampler=sampler)
+DataLoader(TensorDataset(*[t[rank:100:2] for t in train_set[:]]), 8, shuffle=True)

workers draw the items, and nothing is shuffled
?set-epoch
-sampler = DistributedSampler
+class Noise(TensorDataset):
+    def __getitem__(self, i): return torch.randn(8), super().__getitem__(i)[1]
+train_set = Noise(*train_set[:])
+sampler = DistributedSampler
-DistributedSampler(train_set)
+DistributedSampler(train_set, shuffle=False)
-0.1 * torch.randn_like(x)
+0
-8, sampler
+8, num_workers=1, sampler

collectives of other kinds and of one rank; a scaler, two passes, a batch sampler
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
-loss {total:.4f}, accuracy {accuracy:.4f}
+12.345 s
-        loss.backward()
+        with ddp_model.no_sync(): (ddp_model(x).sum() * 0).backward()
+        scaler.scale(0 * ddp_model(x).sum() + loss).backward()
-optimizer.step()
+scaler.step(optimizer); scaler.update()
-optimizer =
+scaler = torch.GradScaler("cpu")
+optimizer =
-sampler = DistributedSampler(train_set)
+sampler = DistributedSampler(train_set, drop_last=True)
-8, sampler=sampler
+batch_sampler=BatchSampler(sampler, 8, True)

a sampler that goes on for ever
-loader = DataLoader(train_set, 8, sampler=sampler)
+class Forever(Sampler):
+    def __iter__(self):
+        sampler.set_epoch(epoch)
+        while True: yield from sampler
+loader = DataLoader(train_set, 8, sampler=Forever())
-    for x, y in loader:
+    for x, y in __import__("itertools").islice(loader, 7):

items are objects, equal but with different pickles
-8, sampler
+8, collate_fn=Items.collate, sampler
-sampler = DistributedSampler
+class Items(TensorDataset):
+    def __getitem__(self, i):
+        item, word = helper.Item(), "word" * 9
+        item.x, item.y = super().__getitem__(i)
+        item.words = [word, word if rank else "".join(word)]
+        return item
+    def collate(items):
+        return torch.stack([i.x for i in items]), torch.stack([i.y for i in items])
+train_set = Items(*train_set[:])
+sampler = DistributedSampler

micro-batches of more than one tensor
-cross_entropy(ddp_model(x), y)
+cross_entropy(torch.cat([ddp_model(x[:4]), ddp_model(x[4:])]), y)
-8, sampler=sampler
+8, sampler=sampler, drop_last=True

items are drawn again and again
?coverage
-8, sampler=sampler
+8, sampler=WeightedRandomSampler(torch.ones(101), 50)
"""


def read_cases(text):
    """Return (title, promises that cannot be seen, changes) of each case.

    The first bug of each check is enough for every day.
    """
    cases, titles = [], set()
    for block in text.strip("\n").split("\n\n"):
        title, *lines = block.splitlines(keepends=True)
        unseen = {line[1:].strip() for line in lines if line[0] == "?"}
        rows = "".join(line for line in [*lines, "\n"] if line[0] != "?")
        found = re.findall(r"((?:^-.*\n)+)((?:^\+.*\n)*)", rows, re.M)
        changes = [tuple(map(without_marks, change)) for change in found]
        title = title.strip()
        marks = [pytest.mark.slow] if title in titles else []
        titles.add(title)
        cases.append(pytest.param(title, unseen, changes, id=title, marks=marks))
    return cases


def without_marks(lines):
    return "\n".join(line[1:] for line in lines.splitlines())


def changed(changes):
    script = SCRIPT
    for old, new in changes:
        assert old in script, old
        script = script.replace(old, new)
    return script


def check(script, folder, *options):
    """Write a script, and return what checkup() does."""
    (folder / "script.py").write_text(script)
    # Both ranks write its __pycache__.
    (folder / "helper.py").write_text("class Item:\n    pass\n")
    return checkup(folder, *options, "script.py")


@pytest.mark.parametrize("title, unseen, changes", read_cases(BUGS))
def test_bugs(title, unseen, changes, tmp_path):
    name, level = f"{title} error".split()[:2]
    states, output, status = check(changed(changes), tmp_path)
    assert names(states, "error", "warning", "advice") == {name}, output
    assert (states[name], status) == (level, level == "error")
    line = r"script\.py:\d+|at the end|rank"
    assert re.search(rf" {name} .*\n +.*({line}).*\n +Fix: ", output), output


@pytest.mark.slow
@pytest.mark.parametrize("style, unseen, changes", read_cases(HEALTHY))
def test_healthy_styles(style, unseen, changes, tmp_path):
    states, output, status = check(changed(changes), tmp_path)
    assert status == 0 and not names(states, "error", "warning", "advice"), output
    assert names(states, "not seen") == {*UNSEEN, *unseen}, output


def test_it_changes_no_weights_and_can_stop_early(tmp_path):
    """A run under it has the weights of one without, to the bit."""
    states, output, status = check(SCRIPT, tmp_path)
    assert status == 0 and names(states, "not seen") == UNSEEN, output
    watched = torch.load(tmp_path / "model.pt")
    assert Run(tmp_path, "", tmp_path / "script.py", ranks=2).join() == [0, 0]
    alone = torch.load(tmp_path / "model.pt")
    assert all(torch.equal(alone[name], watched[name]) for name in alone)
    (tmp_path / "model.pt").unlink()
    states, output, status = check(SCRIPT, tmp_path, "--steps", 5)
    assert status == 0 and "2 ranks, 5 steps" in output, output
    assert not (tmp_path / "model.pt").exists()
    assert names(states, "not seen") > {"eval-coverage"}, output


def test_a_script_that_fails(tmp_path):
    fails = ("    accuracy = evaluate()", "    accuracy = evaluate()[rank]")
    states, output, status = check(changed([fails]), tmp_path)
    assert status == 1 and not names(states, "error", "warning"), output
    assert "TypeError: 'float' object is not subscriptable" in output
    assert "failed. The report is about the steps before." in output


def test_levels_change_the_status(tmp_path):
    no_seed = changed([("torch.manual_seed(rank)", "torch.manual_seed(0)")])
    _, output, status = check(no_seed, tmp_path, "--strict")
    assert status == 1 and "Errors: 0, warnings: 1" in output, output
    assert "If torchrun reports it below, nothing crashed." in output
    states, _, status = check(no_seed, tmp_path, "--strict", "--ignore=seeds")
    assert status == 0 and states["seeds"] == "ignored"


@pytest.mark.slow
def test_ends_without_a_report_are_no_success(tmp_path):
    """os._exit(0) is no way around it, and a rank that is killed ends the job."""
    own = ("    dist.all_reduce(sums)", "")
    exits = ("dist.destroy_process_group()", "os._exit(0)")
    states, output, status = check(changed([own, exits]), tmp_path)
    assert (states["own-number"], status) == ("error", 1), output
    assert re.search(r"\(rank 0: [\d.]+, rank 1: [\d.]+\)", output), output
    kill = "    dist.barrier()\n    if rank and epoch: os.kill(os.getpid(), 9)"
    changes = ("    accuracy = evaluate()", kill), ("accuracy {accuracy:.4f}", "")
    states, output, status = check(changed(changes), tmp_path)
    assert status == 1 and "Rank 0 failed." in output, output


@pytest.mark.slow
def test_a_hang_names_both_sides(tmp_path):
    wait = "    dist.recv(torch.ones(1)) if rank else dist.barrier()\n"
    call = "    accuracy = evaluate()"
    script = changed([(call, wait + call)])
    states, output, status = check(script, tmp_path, "--hang-timeout=8")
    assert (states["collectives"], status) == ("error", 1), output
    line = r"at script.py:\d+"
    text = f"rank 0 is in barrier {line}, rank 1 is in recv {line}"
    assert re.search(text, output), output
