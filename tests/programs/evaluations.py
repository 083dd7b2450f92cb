"""Evaluations without repeated samples: a loader of the rest, and a cut gather."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

dist.init_process_group()
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
x = torch.randn(96, 8)
train_set, val_set = (
    TensorDataset(x[:64], x[:64].sum(1)),
    TensorDataset(x[64:95], x[64:95].sum(1)),
)
model = DDP(nn.Linear(8, 1))
torch.manual_seed(rank)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
sampler = DistributedSampler(train_set)
loader = DataLoader(train_set, 8, sampler=sampler)
val_sampler = DistributedSampler(val_set, shuffle=False, drop_last=True)
val_loader = DataLoader(val_set, 4, sampler=val_sampler)
rest = Subset(val_set, range(len(val_sampler) * world, len(val_set)))
rest_loader = DataLoader(rest, 4)
filled_loader = DataLoader(
    val_set, 4, sampler=DistributedSampler(val_set, shuffle=False)
)


@torch.no_grad()
def evaluate_with_rest(scale=1.0):
    total, count = torch.zeros(()), torch.zeros(())
    for inputs, targets in val_loader:
        total += (model.module(inputs).squeeze(1) - targets).square().sum()
        count += len(inputs)
    # BUG own-number: pass
    dist.all_reduce(total)
    # AND own-number: pass
    dist.all_reduce(count)
    # BUG eval-coverage: for inputs, targets in []:
    for inputs, targets in rest_loader:
        total += (model.module(inputs).squeeze(1) - targets).square().sum()
        count += len(inputs)
    return (total / count).item()


@torch.no_grad()
def evaluate_and_gather():
    outputs = torch.cat([model.module(inputs) for inputs, _ in filled_loader])
    parts = [torch.empty_like(outputs) for _ in range(world)]
    # BUG eval-coverage: dist.all_reduce(outputs)
    dist.all_gather(parts, outputs)
    return torch.stack(parts, 1).flatten(0, 1)[: len(val_set)].mean().item()


for epoch in range(2):
    sampler.set_epoch(epoch)
    for inputs, targets in loader:
        loss = (model(inputs).squeeze(1) - targets).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    # BUG own-number: pass
    mean /= world
    values = evaluate_with_rest(), evaluate_and_gather()
    if rank == 0:
        print(f"train {mean.item():.5f} loss {values[0]:.4f} output {values[1]:.4f}")
dist.destroy_process_group()
