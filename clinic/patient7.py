"""Train a CNN with BatchNorm and DDP; validate on rank 0.

    sbatch run-2gpus.sh patient7.py

It runs without a GPU.
"""

import argparse
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DistributedSampler

from common.data import make_loader, normalise
from common.device import get_device, get_ranks
from common.errors import positive, run
from common.log import RunLog
from common.metrics import batch_sums, to_metrics
from dataset import MEAN, SHAPES, STD, shapes

criterion = nn.CrossEntropyLoss()


class Block(nn.Sequential):
    """A convolution that halves height and width, BatchNorm and ReLU."""

    def __init__(self, channels, out_channels):
        conv = nn.Conv2d(channels, out_channels, 3, stride=2, padding=1, bias=False)
        super().__init__(conv, nn.BatchNorm2d(out_channels), nn.ReLU())


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(Block(3, 16), Block(16, 32), Block(32, 64))
        self.head = nn.Linear(64 * 4 * 4, len(SHAPES))

    def forward(self, images):
        return self.head(self.blocks(images).flatten(1))


def train(model, batches, optimizer, device):
    """Train for an epoch; return this rank's [loss_sum, correct, count]."""
    model.train()
    sums = torch.zeros(3, device=device)  # losses, correct answers, count
    for images, labels in batches:
        images = images.to(device, non_blocking=True)
        labels = labels.to(device, non_blocking=True)
        output = model(normalise(images, MEAN, STD))
        loss = criterion(output, labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        sums += batch_sums(loss, output.argmax(dim=1) == labels)
    return sums


@torch.no_grad()
def evaluate(model, batches, device):
    """Return {"loss": mean, "accuracy": %}."""
    model.eval()
    sums = torch.zeros(3, device=device)  # losses, correct answers, count
    for images, labels in batches:
        images = images.to(device, non_blocking=True)
        labels = labels.to(device, non_blocking=True)
        output = model(normalise(images, MEAN, STD))
        loss = criterion(output, labels)
        sums += batch_sums(loss, output.argmax(dim=1) == labels)
    return to_metrics(sums)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=positive, default=4, help="epochs")
    parser.add_argument("--batch-size", type=int, default=32, help="images per GPU")
    parser.add_argument("--lr", type=float, default=0.05, help="learning rate")
    parser.add_argument("--seed", type=int, default=0, help="random seed")
    args = parser.parse_args()
    rank, local_rank, world_size = get_ranks()

    device = get_device(local_rank)
    dist.init_process_group(timeout=timedelta(seconds=30))  # ends a hang soon
    torch.manual_seed(args.seed + rank)

    log = RunLog(args, device, enabled=rank == 0)
    train_set, val_set = shapes(2048, seed=1), shapes(500, seed=2)
    sampler = DistributedSampler(train_set, seed=args.seed)
    loader = make_loader(train_set, args.batch_size, device, sampler=sampler)
    val_loader = make_loader(val_set, args.batch_size, device)  # only for rank 0

    model = Net().to(device)
    ddp_model = DDP(model)
    optimizer = torch.optim.SGD(ddp_model.parameters(), args.lr, momentum=0.9)
    images, val_metrics = len(train_set), {"accuracy": 0}
    for epoch in range(1, args.epochs + 1):
        sampler.set_epoch(epoch)
        start = time.perf_counter()
        sums = train(ddp_model, log.progress(loader, "training"), optimizer, device)
        seconds = time.perf_counter() - start
        if rank == 0:
            val_metrics = evaluate(ddp_model, val_loader, device)
        dist.all_reduce(sums)
        train_metrics = to_metrics(sums)
        log.epoch(
            epoch, images, seconds, train=train_metrics, validation=val_metrics
        )
    log.write_result(accuracy=val_metrics["accuracy"])
    dist.destroy_process_group()


if __name__ == "__main__":
    run(main)
