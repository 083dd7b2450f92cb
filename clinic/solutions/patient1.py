"""Train a small CNN with DDP to classify four shapes.

    sbatch run-2gpus.sh patient1.py

It prints the first labels of each epoch.
"""

import torch
import torch.distributed as dist  # DDP: communication between processes
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel as DDP  # DDP: wraps a model
from torch.utils.data import DataLoader, DistributedSampler

from common.device import get_device, get_ranks  # DDP: reads torchrun's variables
from common.errors import run
from dataset import shapes


def build_model():
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(64 * 4 * 4, 4),
    )


def main():
    rank, local_rank, world_size = get_ranks()  # DDP: torchrun numbers the processes

    device = get_device(local_rank)  # DDP: local_rank picks the GPU of this node
    torch.manual_seed(rank)  # DDP: each rank has its own random numbers
    dist.init_process_group()  # DDP: NCCL or RCCL on GPUs, Gloo on CPUs

    train_set = shapes(2048)
    sampler = DistributedSampler(train_set)  # DDP: each rank trains on its own shard
    loader = DataLoader(train_set, 32, sampler=sampler)
    model = build_model().to(device)
    ddp_model = DDP(model)  # DDP: copies rank 0's weights, averages gradients
    optimizer = torch.optim.Adam(model.parameters(), 0.003)
    for epoch in range(1, 7):
        sampler.set_epoch(epoch)  # FIX: a new order in every epoch
        loss_sum = torch.zeros((), device=device)
        for step, (images, labels) in enumerate(loader):
            if rank == 0 and step == 0:
                print(f"Epoch {epoch} starts with the labels {labels[:12].tolist()}")
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
