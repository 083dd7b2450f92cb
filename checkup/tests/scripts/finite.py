"""A batch of one rank whose loss is no number."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group()
rank = dist.get_rank()
torch.manual_seed(0)
model = DDP(nn.Linear(8, 2))
torch.manual_seed(rank)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step in range(8):
    x = torch.randn(8, 8)
    # BUG 1 finite: x[0, 0] = torch.nan if (rank, step) == (1, 4) else 0.0
    x[0, 0] = 0.0
    # BUG 2 finite: x[0, 0] = 1e30 if rank == 0 and step == 2 else 0.0
    x[0, 1] = 0.0
    loss = model(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()  # HERE finite
