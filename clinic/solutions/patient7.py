"""Train a CNN with BatchNorm and DDP; validate on rank 0.

    sbatch run-2gpus.sh patient7.py

It prints the validation accuracy and the training loss of each epoch.
"""

from datetime import timedelta

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
        nn.Conv2d(3, 32, 5, stride=2),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * 14 * 14, 4),
    )


@torch.no_grad()
def evaluate(model, loader, device):
    """Return the accuracy in %."""
    model.eval()
    correct = torch.zeros((), device=device)
    for images, labels in loader:
        answers = model(images.to(device)).argmax(dim=1)
        correct += (answers == labels.to(device)).sum()
    model.train()
    return 100 * correct / len(loader.dataset)


def main():
    rank, local_rank, world_size = get_ranks()  # DDP: torchrun numbers the processes

    device = get_device(local_rank)  # DDP: local_rank picks the GPU of this node
    torch.manual_seed(rank)  # DDP: each rank has its own random numbers
    # DDP: NCCL or RCCL on GPUs, Gloo on CPUs
    dist.init_process_group(timeout=timedelta(seconds=30))  # ends a hang soon

    train_set, val_set = shapes(2048, seed=1), shapes(500, seed=2)
    sampler = DistributedSampler(train_set)  # DDP: each rank trains on its own shard
    loader = DataLoader(train_set, 32, sampler=sampler)
    val_loader = DataLoader(val_set, 50)
    model = build_model().to(device)
    ddp_model = DDP(model)  # DDP: copies rank 0's weights, averages gradients
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    for epoch in range(1, 5):
        sampler.set_epoch(epoch)  # DDP: a new order in every epoch
        loss_sum = torch.zeros((), device=device)
        for images, labels in loader:
            loss = cross_entropy(ddp_model(images.to(device)), labels.to(device))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            loss_sum += loss.detach()
        if rank == 0:
            print(f"Epoch {epoch} is trained")
            accuracy = evaluate(model, val_loader, device)  # FIX: no collectives
            print(f"Epoch {epoch}: validation accuracy {accuracy:.1f} %")
        dist.all_reduce(loss_sum)  # DDP: the sum over all ranks
        if rank == 0:
            print(f"Epoch {epoch}: loss {loss_sum / world_size / len(loader):.4f}")
    dist.destroy_process_group()  # DDP: closes what init_process_group opened


if __name__ == "__main__":
    run(main)
