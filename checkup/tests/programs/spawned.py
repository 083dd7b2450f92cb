"""Starts its ranks itself, and its loader's workers by spawn, too."""

import os

import torch
import torch.multiprocessing as mp
from torch import nn
from torch.distributed import all_reduce, destroy_process_group, init_process_group
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def setup(rank, world_size):
    os.environ["MASTER_ADDR"] = "localhost"
    os.environ["MASTER_PORT"] = os.environ["PORT"]
    init_process_group("gloo", rank=rank, world_size=world_size)


def train(rank, world_size, epochs):
    setup(rank, world_size)
    torch.manual_seed(0)
    x = torch.randn(64, 8)
    dataset = TensorDataset(x, (x.sum(1) > 0).long())
    model = DDP(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2)))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    sampler = DistributedSampler(dataset)
    workers = {"num_workers": 1, "multiprocessing_context": "spawn"}
    workers["persistent_workers"] = True
    loader = DataLoader(dataset, 8, sampler=sampler, **workers)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for inputs, labels in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(inputs), labels)
            loss.backward()
            optimizer.step()
    loss = loss.detach()
    # BUG collectives: rank or all_reduce(loss)
    all_reduce(loss)
    destroy_process_group()


if __name__ == "__main__":
    mp.spawn(train, args=(2, 3), nprocs=2)
