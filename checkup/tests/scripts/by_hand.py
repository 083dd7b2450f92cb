"""Gradients that the script averages itself, in one flat buffer."""

import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group()
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(rank)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
for parameter in model.parameters():
    # BUG 1 start: pass
    dist.broadcast(parameter.data, 0)
# BUG 2 same-batch, seeds warning: torch.manual_seed(5)
torch.manual_seed(rank)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step in range(8):
    x = torch.randn(8, 8)
    loss = model(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    # BUG 3 clipping: nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    pass  # HERE clipping
    flat = torch.cat([p.grad.flatten() for p in model.parameters()])
    dist.all_reduce(flat)
    # BUG 4 gradients warning: pass
    flat /= world_size
    for parameter, part in zip(
        model.parameters(), flat.split([p.numel() for p in model.parameters()])
    ):
        parameter.grad = part.view_as(parameter)
    # BUG 5 gradients: model[0].bias.grad.mul_(-1 if rank else 1)
    pass
    grad = model[0].weight.grad
    # BUG 6 gradients: model[0].weight.grad = grad.flip(0) if rank else grad
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()  # HERE start same-batch gradients seeds
