"""Orders that may repeat: a fold or a stage has its own loader; no sampler has a length."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Sampler, Subset

dist.init_process_group()
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)


class Data(Dataset):
    def __len__(self):
        return 96

    def __getitem__(self, i):
        return torch.full((8,), float(i))


class Endless(Sampler):
    def __init__(self):
        self.epoch = 0

    def __len__(self):
        raise NotImplementedError

    def __iter__(self):
        generator = torch.Generator().manual_seed(self.epoch)
        # BUG 1 coverage: order = torch.randperm(96, generator=generator.manual_seed(rank))
        order = torch.randperm(96, generator=generator)
        return iter(order[rank::world_size].tolist())


def train(model, loader, epochs=1):
    optimizer = torch.optim.SGD(model.parameters(), 1e-9)
    for epoch in range(epochs):
        # BUG 1 set-epoch: pass
        loader.sampler.epoch = epoch
        for x in loader:  # HERE set-epoch
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()


data = Data()
for fold in range(3):
    own = Subset(data, [i for i in range(96) if i % 3 != fold])
    train(DDP(nn.Linear(8, 2)), DataLoader(own, 8, sampler=DistributedSampler(own)))
model = DDP(nn.Linear(8, 2))
for stage in range(2):
    train(model, DataLoader(data, 8, sampler=DistributedSampler(data)))
train(model, DataLoader(data, 8, sampler=DistributedSampler(data)), epochs=2)
train(model, DataLoader(data, 8, sampler=Endless()))
# Each rank has its own files by design, and training stops within an epoch.
torch.manual_seed(rank)
files = [torch.randn(8) for _ in range(64 + 8 * rank)]
loader = DataLoader(files, 8, shuffle=True)
optimizer = torch.optim.SGD(model.parameters(), 1e-9)
for step, x in zip(range(6), loader):
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
