"""LocalSGD: ranks average their weights every four steps, and no gradients."""

import time

import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group()
rank, world = dist.get_rank(), dist.get_world_size()
if rank == 0:
    time.sleep(4)  # a download; the other rank waits for longer than --hang-timeout
dist.barrier()
torch.manual_seed(0)
model = nn.Linear(8, 1)
torch.manual_seed(rank)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
for step in range(12):
    x = torch.randn(8, 8)
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
    if step % 4 == 3:
        for p in model.parameters():
            dist.all_reduce(p.data)
            p.data /= world
dist.destroy_process_group()
