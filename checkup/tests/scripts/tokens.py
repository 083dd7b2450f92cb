"""A language model whose batches have padding, and a checkpoint that it loads."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group()
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 4))
# BUG 1 checkpoint: state = {f"module.{name}": value for name, value in model.state_dict().items()}
state = {name: value.clone() for name, value in model.state_dict().items()}
model.load_state_dict(state, strict=False)  # HERE checkpoint
ddp_model = DDP(model)
torch.manual_seed(rank)
optimizer = torch.optim.AdamW(model.parameters(), 0.01)
for step in range(8):
    x, y = torch.randn(16, 8), torch.randint(4, (16,))
    y[4 + 8 * rank :] = -100
    count = (y >= 0).sum()
    dist.all_reduce(count)
    scores = ddp_model(x)
    loss = nn.functional.cross_entropy(scores, y, reduction="sum")
    # BUG 1 loss-count warning: loss = nn.functional.cross_entropy(scores, y)
    loss = loss * world_size / count
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()  # HERE loss-count
