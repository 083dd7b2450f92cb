"""Starts its ranks itself, and its loader's workers by spawn, too."""

import os

import torch
import torch.multiprocessing as mp
from torch import nn
from torch.distributed import all_reduce, destroy_process_group, init_process_group
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def setup(rank, world_size):
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = (
        "localhost",
        os.environ["PORT"],
    )
    init_process_group("gloo", rank=rank, world_size=world_size)


def train(rank, world_size, epochs):
    setup(rank, world_size)
    torch.manual_seed(0)
    x = torch.randn(64, 8)
    dataset = TensorDataset(x, (x.sum(1) > 0).long())
    model = DDP(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2)))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    # BUG coverage: sampler = DistributedSampler(dataset, 2, 0)
    sampler = DistributedSampler(dataset)
    loader = DataLoader(
        dataset,
        8,
        sampler=sampler,
        num_workers=1,
        multiprocessing_context="spawn",
        persistent_workers=True,
    )
    for epoch in range(epochs):
        # BUG set-epoch: pass
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
