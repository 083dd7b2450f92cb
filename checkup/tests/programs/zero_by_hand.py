"""ZeRO-2 by hand: step() reduces the gradients' shards and gathers the weights."""

import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))
torch.manual_seed(rank)


class ShardedSGD(torch.optim.SGD):
    @torch.no_grad()
    def step(self):
        for p in self.param_groups[0]["params"]:
            size = p.numel() // world
            part = p.grad.flatten()[rank * size :][:size]
            dist.reduce_scatter(part, [*p.grad.flatten().split(size)])
            mine = p.flatten()[rank * size :][:size] - 0.1 * part / world
            # BUG gradients: p.flatten()[rank * size :][:size].copy_(mine)
            dist.all_gather([*p.flatten().split(size)], mine)


optimizer = ShardedSGD(model.parameters())
for _ in range(8):
    optimizer.zero_grad()
    model(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()
dist.destroy_process_group()
