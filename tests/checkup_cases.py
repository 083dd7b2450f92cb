"""A script of plain PyTorch, its bugs, and its other styles."""

import re

import pytest

SCRIPT = """
import os, random, tempfile, helper, numpy as np
import torch, torch.distributed as dist
from contextlib import ExitStack
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
copy = nn.Linear(8, 2).eval()
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
    torch.save(model.state_dict() | copy.state_dict(), "model.pt")
dist.destroy_process_group()
"""
# The script has no DTensors, clips no gradients, and so on.
UNSEEN = {"shards", "clipping", "gathered", "checkpoint"}
UNSEEN |= {"class-weights", "schedule", "numbering"}
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

weights
-0.1, 0.9
+0.1 + rank, 0.9

eval-coverage warning
-Subset(val_set, range(rank, 129, world_size)), 8
+val_set, 8, sampler=DistributedSampler(val_set)

collectives
-    dist.all_reduce(total)
+    dist.broadcast(total, rank)

collectives
-    for x, y in loader:
+    for x, y in [*loader][rank:]:

files warning
-torch.manual_seed(rank)
+torch.manual_seed(rank); log = open("log.txt", "a")

host-sync advice
-        loss.backward()
+        loss.backward(); loss.item()

own-number
-    dist.all_reduce(sums)

own-number warning
-    dist.all_reduce(total)

own-number warning
-    dist.all_reduce(sums)
-    return sums[0].item() / sums[1].item()
+    return (sums.numpy()[0] / sums.numpy()[1]) ** 0.5

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

collectives
-        loss.backward()
+        if rank == 0 and epoch: dist.all_reduce(loss.detach().clone())
+        loss.backward()

seeds warning
-torch.manual_seed(rank)
+torch.manual_seed(0)
-0.1 * torch.randn_like(x)
+0.1 * torch.randn(len(x) + rank, 8)[:len(x)]

own-number warning
-    accuracy = evaluate()
+    if rank == 0:
+        with torch.no_grad():
+            for x, y in DataLoader(val_set, 8): copy(x)
-loss {total:.4f}, accuracy {accuracy:.4f}
+loss {loss.item():.4f}

own-number warning
-    dist.all_reduce(total)
-    total = (total[0] / total[1]).item()
+    last = loss.detach().clone()
+    dist.all_reduce(last)
+    total = last.item()

files
-torch.manual_seed(rank)
+torch.manual_seed(rank); open(b"notes.txt", "w").close()

files
-torch.manual_seed(rank)
+torch.manual_seed(rank); torch.jit.save(torch.jit.script(nn.ReLU()), "relu.pt")

files
-torch.manual_seed(rank)
+torch.manual_seed(rank)
+with torch.profiler.profile() as profile: norm(images)
+for turn in range(rank): dist.barrier()
+profile.export_chrome_trace("trace.json")
+for turn in range(rank, world_size): dist.barrier()

files warning
-torch.manual_seed(rank)
+torch.manual_seed(rank); __import__("sqlite3").connect("results.db").close()

files warning
-torch.manual_seed(rank)
+torch.manual_seed(rank)
+from torch.utils.tensorboard import SummaryWriter
+SummaryWriter("runs").close()
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
?own-number
-    total = (
+    tempfile.TemporaryFile().close()
+    with torch.no_grad(): target(x); (x[0, 0] * torch.nan).item()
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
+12.345 s of 100
-        loss.backward()
+        with ddp_model.no_sync(): (ddp_model(x).sum() * 0).backward()
+        scaler.scale(0 * ddp_model(x).sum() + loss).backward()
-optimizer.step()
+scaler.step(optimizer); scaler.update()
-optimizer =
+target = DDP(nn.Linear(8, 2))
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
-        loss.backward()
+        loss.backward(); print(0.123)

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

ranks have different numbers of batches
?start
?gradients
?weights
?buffers
-DataLoader(train_set, 8, sampler=sampler)
+DataLoader(Subset(train_set, range(70 * rank, 70 + 31 * rank)), 8, shuffle=True)
-    for x, y in loader:
+    stack = ExitStack()
+    stack.enter_context(ddp_model.join())
+    for x, y in loader:
-    dist.all_reduce(total)
+    stack.close()
+    dist.all_reduce(total)

rank 0 starts to validate in the middle of an epoch, and nothing is random
?seeds
-torch.manual_seed(rank)
+torch.manual_seed(0)
-0.1 * torch.randn_like(x)
+0
-        total +=
+        if rank == 0: iter(val_loader)
+        total +=

items are drawn again and again
?coverage
-sampler = DistributedSampler
+class Drawn(DistributedSampler):
+    __len__ = lambda self: 1250
+    __iter__ = lambda self: iter(torch.randint(101, [1250]).tolist())
+sampler = Drawn

times of day are no totals, and an exact evaluation proves nothing of another one
?eval-coverage
-Subset(val_set, range(rank, 129, world_size)), 8
+val_set, 8, sampler=DistributedSampler(val_set, shuffle=False)
-    dist.all_reduce(sums)
+    parts = [torch.zeros(2) for _ in range(world_size)]
+    dist.all_gather(parts, sums)
+    sums = sum(parts)
+    print("2026-11-26 12:00:00,130 INFO evaluated")
+    for x, y in DataLoader(Subset(val_set, range(rank, 129, world_size)), 9): pass
-accuracy {accuracy
+recall {accuracy

rank 0 alone keeps an average of the weights, and saves it
-copy = nn.Linear(8, 2).eval()
+from copy import deepcopy
+copy = deepcopy(model[1]).eval()
-        total +=
+        if rank == 0: copy.weight.data.lerp_(model[1].weight.data, 0.1)
+        total +=

the data set reads numbers of tensors
-sampler = DistributedSampler
+class Reads(TensorDataset):
+    def __getitem__(self, i):
+        return self.tensors[0][i], torch.tensor(int(self.tensors[1][i]))
+train_set = Reads(*train_set[:])
+sampler = DistributedSampler

rank 0 alone evaluates, so that nothing can be compared
?own-number
-    for buffer in model.buffers(): dist.broadcast(buffer, 0)
+    pass
-    dist.all_reduce(sums)
+    pass
-Subset(val_set, range(rank, 129, world_size)), 8
+val_set, 8
-    accuracy = evaluate()
+    accuracy = evaluate() if rank == 0 else 0
-loss {total:.4f}, accuracy {accuracy:.4f}
+accuracy {accuracy:.4f}
"""


def read_cases(text):
    """Return (title, promises that cannot be seen, changes) of each case.

    The first bug of each check is enough for every day.
    """
    cases = []
    for block in text.strip("\n").split("\n\n"):
        title, *lines = block.splitlines()
        unseen = {line[1:] for line in lines if line[0] == "?"}
        rows = "".join(f"{line}\n" for line in lines if line[0] != "?")
        found = re.findall(r"((?:^-.*\n)+)((?:^\+.*\n)*)", rows, re.M)
        changes = [
            [re.sub("^[-+]", "", part, flags=re.M)[:-1] for part in change]
            for change in found
        ]
        marks = [pytest.mark.slow] * (title in [case.id for case in cases])
        cases.append(pytest.param(title, unseen, changes, id=title, marks=marks))
    return cases


def changed(changes):
    script = SCRIPT
    for old, new in changes:
        assert old in script, old
        script = script.replace(old, new)
    return script
