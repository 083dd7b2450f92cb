"""Steps on random offsets of a sequence: no loader, compiled, gradients in bf16."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
master = rank == 0
# BUG same-batch seeds: torch.manual_seed(1337)
torch.manual_seed(1337 + rank)
data = torch.randint(0, 32, (5000,), generator=torch.Generator().manual_seed(0))


def get_batch(size=8, length=16):
    offsets = torch.randint(len(data) - length - 1, (size,))
    x = torch.stack([data[i : i + length] for i in offsets])
    y = torch.stack([data[i + 1 : i + 1 + length] for i in offsets])
    return x, y


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(32, 16)
        self.head = nn.Linear(16, 32)

    def forward(self, x, targets):
        logits = self.head(self.embedding(x))
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


raw_model = Model()
ddp = DDP(raw_model)
ddp.register_comm_hook(None, default_hooks.bf16_compress_hook)
# BUG gradients: model = torch.compile(raw_model, backend="eager")
model = torch.compile(ddp, backend="eager")
optimizer = torch.optim.AdamW(raw_model.parameters(), lr=1e-3, fused=True)


@torch.no_grad()
def estimate_loss():
    return raw_model(*val_batch).item()


val_batch = get_batch()
x, y = get_batch()
for step in range(12):
    if step % 4 == 0 and master:
        print(f"step {step}: val loss {estimate_loss():.4f}")
    for micro_step in range(2):
        ddp.require_backward_grad_sync = micro_step == 1
        loss = model(x, y) / 2
        x, y = get_batch()
        loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
if master:
    torch.save(raw_model.state_dict(), "ckpt.pt")
dist.destroy_process_group()
