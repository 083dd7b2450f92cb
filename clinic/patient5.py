"""Train a small CNN with DDP on one node, or on several.

    sbatch run-2gpus.sh patient5.py
    sbatch run-2nodes.sh patient5.py

With two processes in all, both commands should print the same accuracies.
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
        nn.Conv2d(3, 32, 5, stride=2),
        nn.ReLU(),
        nn.Conv2d(32, 64, 5, stride=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(64 * 5 * 5, 4),
    )


def main():
    rank, local_rank, world_size = get_ranks()  # DDP: torchrun numbers the processes

    device = get_device(local_rank)  # DDP: local_rank picks the GPU of this node
    torch.manual_seed(rank)  # DDP: each rank has its own random numbers
    dist.init_process_group()  # DDP: NCCL or RCCL on GPUs, Gloo on CPUs

    train_set, val_set = shapes(1024, seed=1), shapes(500, seed=2)
    sampler = DistributedSampler(
        train_set,
        num_replicas=world_size,
        rank=local_rank,
    )
    loader = DataLoader(train_set, 16, sampler=sampler)
    val_shard = Subset(val_set, range(rank, len(val_set), world_size))  # DDP: shard
    val_loader = DataLoader(val_shard, 50)
    model = build_model().to(device)
    ddp_model = DDP(model)  # DDP: copies rank 0's weights, averages gradients
    optimizer = torch.optim.Adam(model.parameters(), 0.001)
    for epoch in range(1, 11):
        sampler.set_epoch(epoch)  # DDP: a new order in every epoch
        for images, labels in loader:
            loss = cross_entropy(ddp_model(images.to(device)), labels.to(device))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        correct = torch.zeros((), device=device)
        with torch.no_grad():
            for images, labels in val_loader:
                answers = model(images.to(device)).argmax(dim=1)
                correct += (answers == labels.to(device)).sum()
        dist.all_reduce(correct)  # DDP: the sum over all ranks
        if rank == 0:
            accuracy = 100 * correct / len(val_set)
            print(f"Epoch {epoch}: validation accuracy {accuracy:.1f} %")
    dist.destroy_process_group()  # DDP: closes what init_process_group opened


if __name__ == "__main__":
    run(main)
