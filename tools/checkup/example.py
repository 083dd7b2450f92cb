"""Train a small model with DDP, with one bug that gives no error.

ddp-checkup -n 2 example.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
torch.manual_seed(0)
images = torch.randn(512, 16)
dataset = TensorDataset(images, (images.sum(1) > 0).long())
model = DDP(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 2)))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
sampler = DistributedSampler(dataset)
loader = DataLoader(dataset, 32, sampler=sampler)
for epoch in range(3):
    total = torch.zeros(())
    for inputs, labels in loader:
        loss = nn.functional.cross_entropy(model(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.detach()
    dist.all_reduce(total)
    mean = total.item() / len(loader) / dist.get_world_size()
    if dist.get_rank() == 0:
        print(f"Epoch {epoch}: loss {mean:.4f}")
dist.destroy_process_group()
