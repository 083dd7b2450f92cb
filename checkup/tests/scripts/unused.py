"""A layer that one rank's forward pass leaves out."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        # BUG 1 unused-parameters: return self.first(x)
        return self.second(self.first(x))


dist.init_process_group()
torch.manual_seed(dist.get_rank())
model = DDP(Net())
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step in range(8):
    optimizer.zero_grad()
    model(torch.randn(8, 8)).square().mean().backward()  # HERE unused-parameters
    optimizer.step()
