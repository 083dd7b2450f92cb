"""A model that each rank trains for itself on purpose, beside one of all ranks."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group()
rank = dist.get_rank()
torch.manual_seed(0)
model = DDP(nn.Linear(8, 2))
# BUG 2 buffers warning: torch.manual_seed(rank)
pass
teacher = nn.Linear(8, 2).eval()
torch.manual_seed(rank)
# BUG 1 gradients warning: reference, parts = nn.Linear(8, 2), None
reference, parts = None, nn.Linear(8, 2)
optimizers = [torch.optim.SGD(model.parameters(), 0.1)]
if reference:
    reference.load_state_dict(model.module.state_dict())
    optimizers.append(torch.optim.SGD(reference.parameters(), 0.1))
for step in range(8):
    x = torch.randn(8, 8)
    with torch.no_grad():
        target = teacher(x)  # HERE buffers
    for own, optimizer in zip([model, reference], optimizers):
        optimizer.zero_grad()
        (own(x) - target).square().mean().backward()
        optimizer.step()  # HERE gradients
