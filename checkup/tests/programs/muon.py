"""DDP, and an optimizer whose step() gathers what each rank has computed."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = DDP(nn.Sequential(nn.Linear(8, 8, False), nn.Tanh(), nn.Linear(8, 8, False)))
torch.manual_seed(rank)


class Muon(torch.optim.Optimizer):
    @torch.no_grad()
    def step(self):
        for p in self.param_groups[0]["params"]:
            rows = p.grad.chunk(world)[rank].contiguous()
            update = torch.empty_like(p)
            dist.all_gather_into_tensor(update, rows / rows.norm())
            # BUG weights: p.sub_(update, alpha=0.02 + 0.01 * rank)
            p.sub_(update, alpha=0.02)


optimizer = Muon(model.parameters(), {})
for _ in range(8):
    optimizer.zero_grad()
    # BUG same-batch seeds: torch.manual_seed(_), model(torch.randn(4, 8)).sum().backward()
    model(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()
dist.destroy_process_group()
