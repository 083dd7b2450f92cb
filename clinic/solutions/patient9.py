"""Train a small CNN with stochastic depth and DDP to classify four shapes.

    sbatch run-2gpus.sh patient9.py

It prints the training loss of each epoch.
"""

import random

import torch
import torch.distributed as dist  # DDP: communication between processes
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel as DDP  # DDP: wraps a model
from torch.utils.data import DataLoader, DistributedSampler

from common.device import get_device, get_ranks  # DDP: reads torchrun's variables
from common.errors import run
from dataset import shapes


class Net(nn.Module):
    """A CNN with a block that is left out in one of ten steps (stochastic depth)."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 16, 3, stride=2, padding=1)
        self.conv2 = nn.Conv2d(16, 32, 3, stride=2, padding=1)
        self.block = nn.Conv2d(32, 32, 3, padding=1)
        self.head = nn.Linear(32 * 8 * 8, 4)

    def forward(self, x):
        x = self.conv1(x).relu()
        x = self.conv2(x).relu()
        if random.random() > 0.1:
            x = x + self.block(x).relu()
        return self.head(x.flatten(1))


def main():
    rank, local_rank, world_size = get_ranks()  # DDP: torchrun numbers the processes

    device = get_device(local_rank)  # DDP: local_rank picks the GPU of this node
    torch.manual_seed(rank)  # DDP: each rank has its own random numbers
    dist.init_process_group()  # DDP: NCCL or RCCL on GPUs, Gloo on CPUs
    random.seed(rank)

    train_set = shapes(2048)
    sampler = DistributedSampler(train_set)  # DDP: each rank trains on its own shard
    loader = DataLoader(train_set, 32, sampler=sampler)
    model = Net().to(device)
    ddp_model = DDP(  # DDP: copies rank 0's weights, averages gradients
        model,
        find_unused_parameters=True,  # FIX: some steps leave out the block
    )
    optimizer = torch.optim.Adam(model.parameters(), 0.003)
    for epoch in range(1, 7):
        sampler.set_epoch(epoch)  # DDP: a new order in every epoch
        loss_sum = torch.zeros((), device=device)
        for images, labels in loader:
            loss = cross_entropy(ddp_model(images.to(device)), labels.to(device))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            loss_sum += loss.detach()
        dist.all_reduce(loss_sum)  # DDP: the sum over all ranks
        if rank == 0:
            print(f"Epoch {epoch}: loss {loss_sum / world_size / len(loader):.4f}")
    dist.destroy_process_group()  # DDP: closes what init_process_group opened


if __name__ == "__main__":
    run(main)
