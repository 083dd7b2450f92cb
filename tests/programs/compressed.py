"""Gradients in bf16 by a hook, and a compiled model."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
torch.manual_seed(0)
x = torch.randn(96, 8)
dataset = TensorDataset(x, x.sum(1, keepdim=True))
net = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1), nn.Linear(8, 1))
ddp = DistributedDataParallel(net)
ddp.register_comm_hook(None, default_hooks.bf16_compress_hook)
# BUG gradients: model = torch.compile(net, backend="eager")
model = torch.compile(ddp, backend="eager")
# BUG seeds: torch.manual_seed(0)
torch.manual_seed(dist.get_rank())
optimizer = torch.optim.Adam(net.parameters(), fused=True)
sampler = DistributedSampler(dataset, drop_last=True)
loader = DataLoader(dataset, 8, sampler=sampler, drop_last=True)
for epoch in range(3):
    sampler.set_epoch(epoch)
    total = torch.zeros(())
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        total += loss.detach()
    # BUG own-number: pass
    dist.all_reduce(total, dist.ReduceOp.AVG)
    if dist.get_rank() == 0:
        print(f"epoch {epoch}: loss {total.item() / len(loader):.5f}")
dist.destroy_process_group()
