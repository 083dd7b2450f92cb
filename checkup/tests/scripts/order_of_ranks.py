"""Collectives that one rank calls otherwise than the others."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group()
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = DDP(nn.Linear(8, 2))
torch.manual_seed(rank)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step in range(8):
    # BUG 5 collectives: if step < 8 - rank:
    if True:
        optimizer.zero_grad()
        model(torch.randn(8, 8)).square().mean().backward()
        optimizer.step()
total = torch.ones(2)
# BUG 1 collectives: dist.all_reduce(total.double() if rank else total)
dist.all_reduce(total)
# BUG 2 collectives: dist.all_reduce(total, dist.ReduceOp.MAX if rank else dist.ReduceOp.SUM)
dist.all_reduce(total, dist.ReduceOp.MAX)
# BUG 3 collectives: dist.recv(torch.ones(1)) if rank else dist.barrier()
dist.barrier()
# BUG 4 collectives warning: dist.all_reduce(total, async_op=True)
dist.all_reduce(total, async_op=True).wait()
if rank == 0:
    # BUG 6 collectives: dist.all_reduce(total)
    print("done")
