"""Uneven inputs with join(), and gradient accumulation with no_sync()."""

from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
rng = torch.Generator().manual_seed(rank)
data = TensorDataset(torch.randn(40 + 16 * rank, 8, generator=rng))
model = DDP(nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), 0.01)
loader = DataLoader(data, 4, shuffle=True, generator=rng)
for epoch in range(2):
    with model.join():
        for i, (x,) in enumerate(loader):
            averages = i % 2 == 1
            with nullcontext() if averages else model.no_sync():
                model(x).square().mean().backward()
            if i % 2 == 1:
                optimizer.step()
                optimizer.zero_grad()
dist.destroy_process_group()
