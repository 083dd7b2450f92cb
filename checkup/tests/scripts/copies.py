"""An average of the weights, buffers in one order, and numbers below zero."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, Subset, TensorDataset

dist.init_process_group()
rank, world_size = dist.get_rank(), dist.get_world_size()


class Net(nn.Linear):
    def __init__(self):
        super().__init__(8, 1)
        # BUG 2 buffers: names = ["scale", "shift"] if rank else ["shift", "scale"]
        names = ["scale", "shift"]
        for name in names:
            self.register_buffer(name, torch.ones(1))


torch.manual_seed(0)
model = DDP(Net())  # HERE buffers
x = torch.randn(160, 8)
data = TensorDataset(x, x.sum(1, keepdim=True))
val_loader = DataLoader(Subset(data, range(rank, 160, world_size)), 8)
torch.manual_seed(rank)
ema = AveragedModel(model.module).eval()
optimizer = torch.optim.SGD(model.parameters(), 0.01)
for epoch in range(3):
    for step in range(6):
        x = torch.randn(8, 8)
        optimizer.zero_grad()
        (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
        optimizer.step()
        # BUG 3 buffers: rank or ema.update_parameters(model.module)
        ema.update_parameters(model.module)
    total = torch.zeros(2)
    with torch.no_grad():
        for x, y in val_loader:
            total += torch.tensor([(model.module(x) - y - 9).sum(), len(y)])
        ema(x)  # HERE buffers
    # BUG 1 own-number: pass
    dist.all_reduce(total)
    # BUG 4 own-number warning: dist.reduce(total, 0)
    pass
    bias = total[0].item() / total[1].item()
    if rank == 0:
        print(f"bias {bias:.4f}")
# BUG 1 files warning: open("empty.txt", "w").close()
open(f"empty{rank}.txt", "w").close()
# BUG 4 files warning: rank = 0
pass
with open(f"log{rank}.txt", "a") as file:
    file.write(f"rank {rank} of process {os.getpid()}\n")
