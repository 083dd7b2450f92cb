"""Train a small CNN with DDP on few images, which it flips and dims at random.

    sbatch run-2gpus.sh patient2.py

It prints how many images each rank has flipped in an epoch.
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
        nn.Conv2d(3, 24, 5, stride=2, padding=2),
        nn.ReLU(),
        nn.Conv2d(24, 48, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(48 * 4 * 4, 4),
    )


def augment(images):
    """Return dimmed images (N, 3, H, W), half of them flipped, and which are."""
    flips = torch.rand(len(images), 1, 1, 1, device=images.device) < 0.5
    images = torch.where(flips, images.flip(3), images)
    dimmed = torch.empty(len(images), 1, 1, 1, device=images.device).uniform_(0.5, 1)
    return (images + 1) * dimmed - 1, flips


def main():
    rank, local_rank, world_size = get_ranks()  # DDP: torchrun numbers the processes

    device = get_device(local_rank)  # DDP: local_rank picks the GPU of this node
    torch.manual_seed(rank)  # FIX: each rank has its own random numbers
    dist.init_process_group()  # DDP: NCCL or RCCL on GPUs, Gloo on CPUs

    train_set = shapes(512)
    sampler = DistributedSampler(train_set)  # DDP: each rank trains on its own shard
    loader = DataLoader(train_set, 16, sampler=sampler)
    model = build_model().to(device)
    ddp_model = DDP(model)  # DDP: copies rank 0's weights, averages gradients
    optimizer = torch.optim.SGD(model.parameters(), 0.02, momentum=0.9)
    for epoch in range(1, 9):
        sampler.set_epoch(epoch)  # DDP: a new order in every epoch
        loss_sum = torch.zeros((), device=device)
        flipped = torch.zeros(world_size, device=device)  # images on each rank
        for images, labels in loader:
            images, flips = augment(images.to(device))
            loss = cross_entropy(ddp_model(images), labels.to(device))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            loss_sum += loss.detach()
            flipped[rank] += flips.sum()
        dist.all_reduce(loss_sum)  # DDP: the sum over all ranks
        dist.all_reduce(flipped)
        if rank == 0:
            mean, flips = loss_sum / world_size / len(loader), flipped.int().tolist()
            print(f"Epoch {epoch}: loss {mean:.4f}, flipped images by rank {flips}")
    dist.destroy_process_group()  # DDP: closes what init_process_group opened


if __name__ == "__main__":
    run(main)
