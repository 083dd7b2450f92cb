"""Train a CNN with DDP, save checkpoints, and resume from them.

    sbatch run-2gpus.sh patient6.py --epochs 4
    sbatch run-2gpus.sh patient6.py --epochs 8 --resume

After every second epoch it saves a checkpoint in logs/patient6.pt.
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist  # DDP: communication between processes
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel as DDP  # DDP: wraps a model
from torch.utils.data import DataLoader, DistributedSampler

from common.device import get_device, get_ranks  # DDP: reads torchrun's variables
from common.errors import run
from dataset import shapes

FILE = Path("logs/patient6.pt")


def main():
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--epochs", type=int, default=8, help="epochs in all")
    parser.add_argument("--resume", action="store_true", help="from the checkpoint")
    args = parser.parse_args()
    rank, local_rank, world_size = get_ranks()  # DDP: torchrun numbers the processes

    device = get_device(local_rank)  # DDP: local_rank picks the GPU of this node
    torch.manual_seed(rank)  # DDP: each rank has its own random numbers
    dist.init_process_group()  # DDP: NCCL or RCCL on GPUs, Gloo on CPUs

    train_set = shapes(1024)
    sampler = DistributedSampler(train_set)  # DDP: each rank trains on its own shard
    loader = DataLoader(train_set, 16, sampler=sampler)
    model = nn.Sequential(
        nn.Conv2d(3, 32, 5, stride=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * 14 * 14, 4),
    ).to(device)
    optimizer = torch.optim.Adam(model.parameters(), 0.003)
    epochs_done = 0
    saved = {"model": model, "optimizer": optimizer}  # FIX: saves Adam's moments
    if args.resume:
        checkpoint = torch.load(FILE, map_location="cpu", weights_only=True)
        epochs_done = checkpoint["epoch"]
        for name, part in saved.items():
            part.load_state_dict(checkpoint[name])
    ddp_model = DDP(model)  # DDP: copies rank 0's weights, averages gradients
    for epoch in range(epochs_done + 1, args.epochs + 1):
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
        if epoch % 2 == 0 and rank == 0:  # FIX: one rank writes the file
            FILE.parent.mkdir(exist_ok=True)
            state = {name: part.state_dict() for name, part in saved.items()}
            torch.save({**state, "epoch": epoch}, FILE)
    dist.destroy_process_group()  # DDP: closes what init_process_group opened


if __name__ == "__main__":
    run(main)
