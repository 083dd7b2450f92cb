"""A classifier with BatchNorm: sampler, evaluation, checkpoint."""

import os
import shutil

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

dist.init_process_group()
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
images = torch.randn(229, 8, generator=torch.Generator().manual_seed(1))
data = TensorDataset(images, (images.sum(1) > 0).long())
# BUG 4 split: order = torch.randperm(229, generator=torch.Generator().manual_seed(rank))
order = torch.randperm(229, generator=torch.Generator().manual_seed(2))
train_set, val_set = Subset(data, order[:100]), Subset(data, order[100:])
model = nn.Sequential(
    nn.BatchNorm1d(8), nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2)
)
ddp_model = DDP(model)
# BUG 2 seeds warning: torch.manual_seed(3)
torch.manual_seed(rank)
sampler = DistributedSampler(train_set)
# BUG 3 coverage: loader = DataLoader(train_set, 8, shuffle=True)
loader = DataLoader(train_set, 8, sampler=sampler)
# BUG 2 eval-coverage warning: part = Subset(val_set, [i % 129 for i in range(rank, 130, 2)])
part = Subset(val_set, range(rank, 129, world_size))
val_loader = DataLoader(part, 8)
# BUG 3 weights: optimizer = torch.optim.SGD(model.parameters(), 0.1 + rank)
optimizer = torch.optim.SGD(model.parameters(), 0.1)


def evaluate():
    model.eval()
    for buffer in model.buffers():
        # BUG 5 buffers: pass
        dist.broadcast(buffer, 0)
    sums = torch.zeros(2)
    with torch.no_grad():
        for x, y in val_loader:  # HERE eval-coverage
            right = (model(x).argmax(1) == y).sum()
            sums += torch.stack([right, torch.tensor(len(y))])
    model.train()  # HERE buffers
    # BUG 1 own-number: pass
    dist.all_reduce(sums)
    return sums[0].item() / sums[1].item()


for epoch in range(3):
    # BUG 1 set-epoch: pass
    sampler.set_epoch(epoch)
    for x, y in loader:  # HERE set-epoch coverage split
        x = x + 0.1 * torch.randn_like(x)
        # BUG 5 gradients: loss = nn.functional.cross_entropy(model(x), y)
        loss = nn.functional.cross_entropy(ddp_model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()  # HERE gradients weights seeds
    accuracy = evaluate()
    if rank == 0:
        print(f"Epoch {epoch}: accuracy {accuracy:.4f}")  # HERE own-number
# BUG 1 files: if True:
if rank == 0:
    torch.save(model.state_dict(), "model.pt")  # HERE files
os.makedirs("scratch", exist_ok=True)
dist.barrier()
# BUG 2 files: if True:
if rank == 0:
    shutil.rmtree("scratch", ignore_errors=True)  # HERE files
dist.destroy_process_group()
