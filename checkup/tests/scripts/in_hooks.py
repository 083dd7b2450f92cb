"""Gradients that hooks of autograd add up."""

import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group()
rank = dist.get_rank()
torch.manual_seed(0)
model = nn.Linear(8, 2)
torch.manual_seed(rank)


def average(parameter):
    dist.all_reduce(parameter.grad)
    # BUG 1 gradients warning: pass
    parameter.grad /= dist.get_world_size()


for parameter in model.parameters():
    parameter.register_post_accumulate_grad_hook(average)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step in range(8):
    loss = model(torch.randn(8, 8)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()  # HERE gradients
