"""A batch sampler that deals out pairs of a switch and an index, as YOLOX's does."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Mosaic(Dataset):
    def __init__(self):
        self.x = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))

    def __len__(self):
        return len(self.x)

    def __getitem__(self, pair):
        mosaic, i = pair
        return self.x[i] + self.x[i - 1] * mosaic


class Batches:
    def __init__(self, data):
        self.sampler = DistributedSampler(data)

    def __iter__(self):
        indices = [*self.sampler]
        for i in range(0, len(indices), 8):
            yield [(True, j) for j in indices[i : i + 8]]

    def __len__(self):
        return len(self.sampler) // 8


dist.init_process_group("gloo")
data = Mosaic()
model = DDP(nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
batches = Batches(data)
loader = DataLoader(data, batch_sampler=batches)
for epoch in range(3):
    batches.sampler.set_epoch(epoch)
    for x in loader:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
dist.destroy_process_group()
