"""Tensor parallelism: both ranks train on the same batch, as they have to."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.distributed.tensor.parallel import parallelize_module

mesh = init_device_mesh("cpu", (2,))
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
rng = torch.Generator()
# BUG shards: rng.manual_seed(0)
rng.manual_seed(dist.get_rank())
nn.init.normal_(model[0].weight.to_local(), generator=rng)
optimizer = torch.optim.SGD(model.parameters(), 0.1, foreach=False)
for step in range(6):
    x = torch.randn(8, 8)
    loss = nn.functional.cross_entropy(model(x), (x.sum(1) > 0).long())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
# BUG files: if True:
if dist.get_rank() == 0:
    open("log.txt", "w").write("done")
# BUG collectives: dist.get_rank() or dist.barrier()
dist.barrier()
dist.destroy_process_group()
