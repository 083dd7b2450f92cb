"""Train a CNN with DDP in two stages: first its head, then all layers.

    sbatch run-2gpus.sh patient3.py

Each rank validates its own copy of the model on all validation images.
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


@torch.no_grad()
def evaluate(model, loader, device):
    """Return the accuracy in %, of all images: each rank evaluates its own model."""
    correct = torch.zeros((), device=device)
    for images, labels in loader:
        answers = model(images.to(device)).argmax(dim=1)
        correct += (answers == labels.to(device)).sum()
    return 100 * correct / len(loader.dataset)


def main():
    rank, local_rank, world_size = get_ranks()  # DDP: torchrun numbers the processes

    device = get_device(local_rank)  # DDP: local_rank picks the GPU of this node
    torch.manual_seed(rank)  # DDP: each rank has its own random numbers
    dist.init_process_group()  # DDP: NCCL or RCCL on GPUs, Gloo on CPUs

    train_set, val_set = shapes(1024, seed=1), shapes(500, seed=2)
    sampler = DistributedSampler(train_set)  # DDP: each rank trains on its own shard
    loader = DataLoader(train_set, 32, sampler=sampler)
    val_loader = DataLoader(val_set, 100)
    features = nn.Sequential(
        nn.Conv2d(3, 16, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 32, 3, stride=2, padding=1),
        nn.ReLU(),
    )
    head = nn.Sequential(nn.Flatten(), nn.Linear(32 * 4 * 4, 4))
    model = nn.Sequential(features, head).to(device)
    features.requires_grad_(False)
    ddp_model = DDP(model)  # DDP: copies rank 0's weights, averages gradients
    optimizer = torch.optim.Adam(head.parameters(), 0.002)
    for epoch in range(1, 11):
        if epoch == 5:
            features.requires_grad_(True)  # the second stage
            optimizer = torch.optim.Adam(model.parameters(), 0.002)
        sampler.set_epoch(epoch)  # DDP: a new order in every epoch
        for images, labels in loader:
            loss = cross_entropy(ddp_model(images.to(device)), labels.to(device))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        accuracies = torch.zeros(world_size, device=device)
        accuracies[rank] = evaluate(model, val_loader, device)
        dist.all_reduce(accuracies)  # DDP: the sum over all ranks
        if rank == 0:
            shown = " and ".join(f"{accuracy:.1f} %" for accuracy in accuracies)
            print(f"Epoch {epoch}: accuracy of the ranks' models {shown}")
    dist.destroy_process_group()  # DDP: closes what init_process_group opened


if __name__ == "__main__":
    run(main)
