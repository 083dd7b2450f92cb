"""Uneven inputs without a DataLoader: join() with a sharded optimizer."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = DDP(nn.Linear(8, 1))
optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01)
# BUG same-batch: torch.manual_seed(0)
torch.manual_seed(rank)
batches = [torch.randn(4, 8) for _ in range(6 + 2 * rank)]
for _epoch in range(2):
    with Join([model, optimizer]):
        for x in batches:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
dist.destroy_process_group()
