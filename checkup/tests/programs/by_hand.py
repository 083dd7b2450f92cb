"""Neither a DataLoader nor DDP: gradients are averaged by hand."""

import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
samples = list(torch.randn(96, 8))
val_samples = torch.randn(32, 8)[rank::world]
# BUG same-batch: mine = samples[: len(samples) // world]
mine = samples[rank::world]
model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.RMSprop(model.parameters(), 0.01)


def average_gradients():
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= world


for epoch in range(2):
    for i in torch.randperm(len(mine)).split(8):
        optimizer.zero_grad()
        model(torch.stack([mine[j] for j in i])).square().mean().backward()
        average_gradients()
        optimizer.step()
    with torch.no_grad():
        error = model(val_samples).square().mean()
        # BUG own-number: pass
        dist.all_reduce(error, dist.ReduceOp.AVG)
        error = error.item()
    if rank == 0:
        print(f"epoch {epoch}: {error:.5f}")
dist.destroy_process_group()
