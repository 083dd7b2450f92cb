"""Train a three-layer perceptron with DDP to tell the arms of a spiral apart.

    sbatch run-2nodes.sh patient5.py

It needs only PyTorch, and nothing from common/.
"""

import argparse
import math
import os
import time

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Subset, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def spirals(n_points, n_arms, seed):
    g = torch.Generator().manual_seed(seed)
    arm = torch.randint(n_arms, (n_points,), generator=g)
    radius = torch.rand(n_points, generator=g).sqrt()
    angle = 2 * math.pi * (arm / n_arms + radius)
    angle += 0.25 * torch.randn(n_points, generator=g)
    points = torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1)
    return TensorDataset(points, arm)


def train_one_epoch(model, loader, loss_fn, optimizer, device):
    total = torch.zeros(2, device=device)
    for x, y in loader:
        x = x.to(device, non_blocking=True)
        y = y.to(device, non_blocking=True)
        optimizer.zero_grad(set_to_none=True)
        loss = loss_fn(model(x), y)
        loss.backward()
        optimizer.step()
        total[0] += loss.detach() * len(y)
        total[1] += len(y)
    dist.all_reduce(total)
    return total[0] / total[1]


def validate(model, loader, device):
    correct_and_count = torch.zeros(2, device=device)
    with torch.no_grad():
        for x, y in loader:
            x = x.to(device, non_blocking=True)
            y = y.to(device, non_blocking=True)
            correct_and_count[0] += (model(x).argmax(1) == y).sum()
            correct_and_count[1] += len(y)
    dist.all_reduce(correct_and_count)
    return correct_and_count[0] / correct_and_count[1]


def main(args):
    rank = int(os.environ["RANK"])
    local_rank = int(os.environ["LOCAL_RANK"])
    world_size = int(os.environ["WORLD_SIZE"])
    use_cuda = torch.cuda.is_available()
    device = torch.device("cpu")
    if use_cuda:
        device = torch.device("cuda", local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if use_cuda else "gloo")
    torch.manual_seed(args.seed)

    train_set = spirals(args.points, 3, seed=10)
    val_set = spirals(999, 3, seed=11)
    train_sampler = DistributedSampler(
        train_set,
        num_replicas=world_size,
        rank=rank,  # FIX: local_rank starts at 0 on each node
        shuffle=True,
        seed=args.seed,
    )
    train_loader = DataLoader(train_set, args.batch_size, sampler=train_sampler)
    val_shard = Subset(val_set, range(rank, len(val_set), world_size))
    val_loader = DataLoader(val_shard, args.batch_size)

    model = nn.Sequential(
        nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 3)
    ).to(device)
    ddp_model = DDP(model, device_ids=[device] if use_cuda else None)
    loss_fn = nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)

    for epoch in range(args.epochs):
        train_sampler.set_epoch(epoch)
        loss = train_one_epoch(ddp_model, train_loader, loss_fn, optimizer, device)
        accuracy = validate(model, val_loader, device)
        if rank == 0:
            print(f"epoch {epoch + 1:2d}  loss {loss:.4f}  accuracy {accuracy:.2%}")
    time.sleep(0.1)  # let Gloo's threads end first: they may abort Python
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--points", type=int, default=1200)
    parser.add_argument("--batch-size", type=int, default=25)
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--seed", type=int, default=0)
    main(parser.parse_args())
