"""Train a CNN with DDP; stop when the validation loss no longer falls.

    sbatch run-2gpus.sh patient12.py

It prints both losses of each epoch.
"""

from datetime import timedelta

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
    # DDP: NCCL or RCCL on GPUs, Gloo on CPUs
    dist.init_process_group(timeout=timedelta(seconds=30))  # ends a hang soon

    train_set, val_set = shapes(1024, seed=1), shapes(60, seed=2)
    sampler = DistributedSampler(train_set)  # DDP: each rank trains on its own shard
    loader = DataLoader(train_set, 32, sampler=sampler)
    val_shard = Subset(val_set, range(rank, len(val_set), world_size))  # DDP: shard
    val_loader = DataLoader(val_shard, 30)
    model = build_model().to(device)
    ddp_model = DDP(model)  # DDP: copies rank 0's weights, averages gradients
    optimizer = torch.optim.Adam(model.parameters(), 0.003)
    best_loss, best_epoch = float("inf"), 0
    for epoch in range(1, 21):
        sampler.set_epoch(epoch)  # DDP: a new order in every epoch
        train_loss = torch.zeros((), device=device)
        val_loss = torch.zeros((), device=device)
        for images, labels in loader:
            loss = cross_entropy(ddp_model(images.to(device)), labels.to(device))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            train_loss += loss.detach() / len(loader)
        with torch.no_grad():
            for images, labels in val_loader:
                loss = cross_entropy(model(images.to(device)), labels.to(device))
                val_loss += loss / len(val_loader)
        losses = torch.stack([train_loss, val_loss]) / world_size
        dist.all_reduce(losses)  # DDP: the sum over all ranks
        if rank == 0:
            print(f"Epoch {epoch}: loss {losses[0]:.4f}, validation {losses[1]:.4f}")
        last_loss = val_loss.item()
        if last_loss < best_loss:
            best_loss, best_epoch = last_loss, epoch
        if epoch == best_epoch + 2:
            break
    dist.barrier()
    dist.destroy_process_group()  # DDP: closes what init_process_group opened


if __name__ == "__main__":
    run(main)
