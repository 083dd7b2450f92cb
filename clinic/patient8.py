"""Train a small CNN with DDP; validate on all ranks after each epoch.

    sbatch run-2gpus.sh patient8.py

It prints the accuracy, and how many images were validated.
"""

import torch
import torch.distributed as dist  # DDP: communication between processes
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel as DDP  # DDP: wraps a model
from torch.utils.data import DataLoader, DistributedSampler, Subset

from common.device import get_device, get_ranks  # DDP: reads torchrun's variables
from common.errors import run
from dataset import shapes


def build_model():
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * 8 * 8, 4),
    )


def main():
    rank, local_rank, world_size = get_ranks()  # DDP: torchrun numbers the processes

    device = get_device(local_rank)  # DDP: local_rank picks the GPU of this node
    torch.manual_seed(rank)  # DDP: each rank has its own random numbers
    dist.init_process_group()  # DDP: NCCL or RCCL on GPUs, Gloo on CPUs

    full_set = shapes(1537)
    train_set = Subset(full_set, range(1024))
    val_set = Subset(full_set, range(1024, 1537))
    sampler = DistributedSampler(train_set)  # DDP: each rank trains on its own shard
    loader = DataLoader(train_set, 32, sampler=sampler)
    val_shard = DistributedSampler(val_set, shuffle=False)
    val_loader = DataLoader(val_set, 32, sampler=val_shard)
    model = build_model().to(device)
    ddp_model = DDP(model)  # DDP: copies rank 0's weights, averages gradients
    optimizer = torch.optim.Adam(model.parameters(), 0.002)
    for epoch in range(1, 7):
        sampler.set_epoch(epoch)  # DDP: a new order in every epoch
        for images, labels in loader:
            loss = cross_entropy(ddp_model(images.to(device)), labels.to(device))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        sums = torch.zeros(2, device=device)  # correct answers, images
        with torch.no_grad():
            for images, labels in val_loader:
                answers = model(images.to(device)).argmax(dim=1)
                sums[0] += (answers == labels.to(device)).sum()
                sums[1] += len(labels)
        if rank == 0:
            correct, count = sums.tolist()
            accuracy = 100 * correct / count
            print(f"Epoch {epoch}: accuracy {accuracy:.2f} % of {count:.0f} images")
    dist.destroy_process_group()  # DDP: closes what init_process_group opened


if __name__ == "__main__":
    run(main)
