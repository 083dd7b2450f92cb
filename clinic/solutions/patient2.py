"""Train a CNN with DDP on few images of four shapes, with augmentation.

    sbatch run-2gpus.sh patient2.py

The training set has only 512 images; augmentation makes up for that.
"""

import argparse
import time

import torch
import torch.distributed as dist
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DistributedSampler, Subset

from common.data import make_loader, normalise
from common.device import get_device, get_ranks
from common.errors import positive, run
from common.log import RunLog
from common.metrics import batch_sums, to_metrics
from dataset import MEAN, STD, flip, shapes


def build_model():
    return nn.Sequential(
        *(nn.Conv2d(3, 24, 5, stride=2, padding=2), nn.ReLU()),
        *(nn.Conv2d(24, 48, 3, stride=2, padding=1), nn.ReLU()),
        *(nn.Conv2d(48, 48, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(48 * 4 * 4, 4)),
    )


def augment(images):
    """Flip, dim and add noise to images (N, C, H, W) at random, on their device."""
    images = flip(images)
    dimmed = torch.empty(len(images), 1, 1, 1, device=images.device).uniform_(0.6, 1)
    return images * dimmed + 0.3 * torch.randn_like(images)


criterion = nn.CrossEntropyLoss()


def train(model, batches, optimizer, device):
    model.train()
    sums = torch.zeros(3, device=device)  # losses, correct answers, count
    for images, labels in batches:
        images = images.to(device, non_blocking=True)
        labels = labels.to(device, non_blocking=True)
        output = model(augment(normalise(images, MEAN, STD)))
        loss = criterion(output, labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        sums += batch_sums(loss, output.argmax(dim=1) == labels)
    dist.all_reduce(sums)
    return to_metrics(sums, check_finite=True)


@torch.inference_mode()
def evaluate(model, batches, device):
    model.eval()
    sums = torch.zeros(3, device=device)  # losses, correct answers, count
    for images, labels in batches:
        images = images.to(device, non_blocking=True)
        labels = labels.to(device, non_blocking=True)
        output = model(normalise(images, MEAN, STD))
        loss = criterion(output, labels)
        sums += batch_sums(loss, output.argmax(dim=1) == labels)
    dist.all_reduce(sums)
    return to_metrics(sums)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=positive, default=12, help="epochs")
    parser.add_argument("--batch-size", type=int, default=16, help="images per GPU")
    parser.add_argument("--lr", type=float, default=0.05, help="learning rate")
    parser.add_argument("--seed", type=int, default=0, help="random seed")
    args = parser.parse_args()
    rank, local_rank, world_size = get_ranks()

    device = get_device(local_rank)
    torch.manual_seed(args.seed + rank)  # FIX: each rank has its own random numbers
    dist.init_process_group()

    train_set, val_set = shapes(512, seed=3), shapes(512, seed=4)
    sampler = DistributedSampler(train_set, seed=args.seed)
    train_loader = make_loader(train_set, args.batch_size, device, sampler=sampler)
    val_set = Subset(val_set, range(rank, len(val_set), world_size))
    val_loader = make_loader(val_set, args.batch_size, device)
    model = build_model().to(device)
    ddp_model = DDP(model)
    optimizer = optim.SGD(model.parameters(), args.lr, momentum=0.9, nesterov=True)
    schedule = optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs)

    log = RunLog(args, device, enabled=rank == 0)
    for epoch in range(1, args.epochs + 1):
        sampler.set_epoch(epoch)
        start = time.perf_counter()
        train_metrics = train(
            ddp_model, log.progress(train_loader, "training"), optimizer, device
        )
        seconds = time.perf_counter() - start
        schedule.step()
        val_metrics = evaluate(model, val_loader, device)
        metrics = {"train": train_metrics, "validation": val_metrics}
        log.epoch(epoch, len(train_set), seconds, **metrics)
    log.write_result(accuracy=val_metrics["accuracy"])
    dist.destroy_process_group()


if __name__ == "__main__":
    run(main)
