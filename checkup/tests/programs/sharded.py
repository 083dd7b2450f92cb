"""FSDP1, and FSDP2 whose weights are drawn after a start on "meta"."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
old = FullyShardedDataParallel(nn.Linear(8, 8), device_id=torch.device("cpu"))
with torch.device("meta"):
    new = nn.Linear(8, 8)
fully_shard(new)
new.to_empty(device="cpu")
new.reset_parameters()  # on CPUs all ranks draw the same numbers for their shards
# BUG same-batch seeds: torch.manual_seed(0)
torch.manual_seed(rank)
optimizers = [torch.optim.AdamW(m.parameters(), 0.01) for m in (old, new)]
for _ in range(6):
    (old(torch.randn(4, 8)) + new(torch.randn(4, 8))).square().mean().backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
options = StateDictOptions(full_state_dict=True, cpu_offload=True)
# BUG collectives: state = {} if rank else get_model_state_dict(new, options=options)
state = get_model_state_dict(new, options=options)
if rank == 0:
    torch.save(state, "model.pt")
dist.barrier()
dist.destroy_process_group()
