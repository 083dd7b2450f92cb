"""Samplers that leave samples out on purpose, and meters of tensors."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Sampler, Subset, SubsetRandomSampler
from torch.utils.data import TensorDataset


class EasyFirst(Sampler):
    """A growing part of the samples, of which each rank takes its own."""

    def __init__(self, order, rank, world):
        self.order, self.rank, self.world, self.epoch = order, rank, world, 0

    def __len__(self):
        return len(self.order) * (1 + self.epoch) // (3 * self.world)

    def __iter__(self):
        part = self.order[: len(self) * self.world]
        shuffled = torch.randperm(
            len(part), generator=torch.Generator().manual_seed(self.epoch)
        )
        # BUG coverage: mine = shuffled[: len(self)]
        mine = shuffled[self.rank :: self.world]
        return iter([part[i] for i in mine])


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
x = torch.randn(192, 8)
dataset = TensorDataset(x, (x.sum(1) > 0).long())
model = DDP(nn.Linear(8, 2))
# BUG split: torch.manual_seed(rank)
torch.manual_seed(1)
order = torch.randperm(len(dataset)).tolist()
train, val = order[:144], order[144:]
torch.manual_seed(rank)
sampler = EasyFirst(train, rank, world)
loaders = [DataLoader(dataset, 8, sampler=sampler)]
loaders += [DataLoader(dataset, 8, sampler=SubsetRandomSampler(train[rank::world]))]
loaders += [DataLoader(Subset(dataset, train[rank::world]), 8, shuffle=True)]
val_loader = DataLoader(dataset, 8, sampler=SubsetRandomSampler(val[rank::world]))
optimizer = torch.optim.SGD(model.parameters(), 0.1)


def evaluate():
    correct, total = torch.tensor(0), torch.tensor(0)
    with torch.no_grad():
        for inputs, labels in val_loader:
            correct += (model(inputs).argmax(1) == labels).sum()
            total += len(labels)
    # BUG own-number: pass
    dist.all_reduce(correct)
    # AND own-number: pass
    dist.all_reduce(total)
    return correct / total


for epoch in range(3):
    sampler.epoch = epoch
    for loader in loaders:
        for inputs, labels in loader:
            optimizer.zero_grad()
            loss = cross_entropy(model(inputs), labels)
            loss.backward()
            optimizer.step()
    print(f"[rank{rank}] epoch {epoch}: loss {loss.item():.4f}")
    accuracy = evaluate()
    if rank == 0:
        print(f"epoch {epoch}: accuracy {accuracy:.4f}")
dist.destroy_process_group()
