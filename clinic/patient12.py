"""Train a CNN with DDP; stop when the validation loss no longer falls.

    sbatch run-2gpus.sh patient12.py

It runs without a GPU.
"""

import argparse
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DistributedSampler, Subset

from common.data import make_loader, normalise
from common.device import get_device, get_ranks
from common.errors import positive, run
from common.log import RunLog
from common.metrics import batch_sums, to_metrics
from dataset import MEAN, SHAPES, STD, shapes


class EarlyStopping:
    """Decides to stop when the loss has not fallen for `patience` epochs."""

    def __init__(self, patience):
        self.patience, self.best, self.epochs = patience, float("inf"), 0

    def should_stop(self, loss):
        self.epochs = 0 if loss < self.best else self.epochs + 1
        self.best = min(self.best, loss)
        return self.epochs == self.patience


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 16, 3, stride=2, padding=1)
        self.conv2 = nn.Conv2d(16, 32, 3, stride=2, padding=1)
        self.conv3 = nn.Conv2d(32, 64, 3, stride=2, padding=1)
        self.head = nn.Linear(64 * 4 * 4, len(SHAPES))

    def forward(self, x):
        x = self.conv1(x).relu()
        x = self.conv2(x).relu()
        x = self.conv3(x).relu()
        return self.head(x.flatten(1))


def train(model, loader, optimizer, device):
    """Train for an epoch; return this rank's [loss_sum, correct, count]."""
    model.train()
    sums = torch.zeros(3, device=device)  # losses, correct answers, count
    for images, labels in loader:
        images = images.to(device, non_blocking=True)
        labels = labels.to(device, non_blocking=True)
        output = model(normalise(images, MEAN, STD))
        loss = cross_entropy(output, labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        sums += batch_sums(loss, output.argmax(dim=1) == labels)
    return sums


@torch.no_grad()
def evaluate(model, loader, device):
    """Return this rank's [loss_sum, correct, count]."""
    model.eval()
    sums = torch.zeros(3, device=device)  # losses, correct answers, count
    for images, labels in loader:
        images = images.to(device, non_blocking=True)
        labels = labels.to(device, non_blocking=True)
        output = model(normalise(images, MEAN, STD))
        loss = cross_entropy(output, labels)
        sums += batch_sums(loss, output.argmax(dim=1) == labels)
    return sums


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=positive, default=20, help="most epochs")
    parser.add_argument("--patience", type=int, default=2, help="in epochs")
    parser.add_argument("--batch-size", type=int, default=32, help="images per GPU")
    parser.add_argument("--lr", type=float, default=0.003, help="learning rate")
    parser.add_argument("--seed", type=int, default=0, help="random seed")
    args = parser.parse_args()
    rank, local_rank, world_size = get_ranks()

    device = get_device(local_rank)
    dist.init_process_group(timeout=timedelta(seconds=30))  # ends a hang soon
    torch.manual_seed(args.seed + rank)

    train_set, val_set = shapes(1024, seed=1), shapes(61, seed=2)
    sampler = DistributedSampler(train_set, seed=args.seed)
    train_loader = make_loader(train_set, args.batch_size, device, sampler=sampler)
    val_shard = Subset(val_set, range(rank, len(val_set), world_size))
    val_loader = make_loader(val_shard, args.batch_size, device)

    model = Net().to(device)
    ddp_model = DDP(model)
    optimizer = torch.optim.Adam(model.parameters(), args.lr)
    stopping = EarlyStopping(args.patience)
    log = RunLog(args, device, enabled=rank == 0)
    for epoch in range(1, args.epochs + 1):
        sampler.set_epoch(epoch)
        start = time.perf_counter()
        train_sums = train(
            ddp_model, log.progress(train_loader, "training"), optimizer, device
        )
        seconds = time.perf_counter() - start
        val_sums = evaluate(model, val_loader, device)
        sums = torch.stack([train_sums, val_sums])
        dist.all_reduce(sums)
        train_metrics, val_metrics = to_metrics(sums[0]), to_metrics(sums[1])
        metrics = {"train": train_metrics, "validation": val_metrics}
        log.epoch(epoch, len(train_set), seconds, **metrics)
        if stopping.should_stop(to_metrics(val_sums)["loss"]):
            break
    dist.barrier()
    log.write_result(accuracy=val_metrics["accuracy"])
    dist.destroy_process_group()


if __name__ == "__main__":
    run(main)
