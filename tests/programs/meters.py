"""Meters and a printing loop of its own, as in many reference scripts."""

import builtins

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
builtin_print = builtins.print


def print_on_rank_0(*words):
    if rank == 0:
        builtin_print(*words)


class Meters(dict):
    """Sums and counts by name; a value is weighted by the size of its batch."""

    def update(self, n, **values):
        for name, value in values.items():
            value = value.item()
            total, count, _ = self.get(name, (0, 0, 0))
            self[name] = total + n * value, count + n, value

    def reduce(self):
        for name, (total, count, value) in self.items():
            sums = torch.tensor([total, count], dtype=torch.float64)
            dist.barrier()
            dist.all_reduce(sums)
            self[name] = *sums.tolist(), value

    def __str__(self):
        means = ((name, v, total / n) for name, (total, n, v) in self.items())
        return "  ".join(f"{name}: {v:.4f} ({mean:.4f})" for name, v, mean in means)


def log_every(loader, meters, header):
    for i, batch in enumerate(loader):
        yield batch
        if i % 2 == 0 or i == len(loader) - 1:
            print(f"{header} [{i}/{len(loader)}] {meters}")


builtins.print = print_on_rank_0
torch.manual_seed(0)
x = torch.randn(101, 8)
dataset = TensorDataset(x, (x.sum(1) > 0).long())
model = DDP(nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 2)))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
sampler = DistributedSampler(dataset)
loader = DataLoader(dataset, 8, sampler=sampler)
val_loader = DataLoader(Subset(dataset, range(rank, 101, world)), 8)
for epoch in range(3):
    sampler.set_epoch(epoch)
    model.train()
    meters = Meters()
    for x, y in log_every(loader, meters, f"Epoch {epoch}"):
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        meters.update(len(x), loss=loss)
    meters.reduce()
    print("Averaged:", meters)
    model.eval()
    meters = Meters()
    with torch.no_grad():
        for x, y in log_every(val_loader, meters, "Test"):
            # BUG buffers: scores = model.module(x)
            scores = model(x)
            right = (scores.argmax(1) == y).float().mean()
            loss = nn.functional.cross_entropy(scores, y)
            meters.update(len(x), acc=100 * right, loss=loss)
    # BUG own-number: dist.barrier()
    meters.reduce()
    print("* Acc {:.3f}".format(meters["acc"][0] / meters["acc"][1]))
dist.destroy_process_group()
