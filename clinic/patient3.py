"""Train a CNN with DDP in two stages: first its head, then all layers.

    sbatch run-2gpus.sh patient3.py

The features are frozen in the first stage and fine-tuned in the second.
"""

import argparse
import time

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


def block(in_channels, out_channels):
    return (
        nn.Conv2d(in_channels, out_channels, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
    )


class Classifier(nn.Module):
    """A CNN for images (N, 3, 32, 32): features (N, 32, 4, 4) and a head."""

    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(*block(3, 16), *block(16, 32), *block(32, 32))
        hidden = nn.Linear(32 * 4 * 4, 64), nn.ReLU()
        self.head = nn.Sequential(nn.Flatten(), *hidden, nn.Linear(64, len(SHAPES)))

    def forward(self, images):
        return self.head(self.features(images))


def forward(model, images, labels, device):
    """Return the loss of a batch, and [loss_sum, correct, count]."""
    images = images.to(device, non_blocking=True)
    labels = labels.to(device, non_blocking=True)
    output = model(normalise(images, MEAN, STD))
    loss = cross_entropy(output, labels)
    return loss, batch_sums(loss, output.argmax(dim=1) == labels)


def train(model, loader, optimizer, device):
    sums = torch.zeros(3, device=device)  # losses, correct answers, count
    for images, labels in loader:
        loss, batch_sum = forward(model, images, labels, device)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        sums += batch_sum
    dist.all_reduce(sums)
    return to_metrics(sums, check_finite=True)


@torch.no_grad()
def evaluate(model, loader, device):
    sums = torch.zeros(3, device=device)  # losses, correct answers, count
    for images, labels in loader:
        sums += forward(model, images, labels, device)[1]
    dist.all_reduce(sums)
    return to_metrics(sums)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=positive, default=4, help="epochs")
    parser.add_argument("--finetune-epochs", type=int, default=6, help="more epochs")
    parser.add_argument("--batch-size", type=int, default=32, help="images per GPU")
    parser.add_argument("--lr", type=float, default=0.002, help="learning rate")
    parser.add_argument("--seed", type=int, default=0, help="random seed")
    args = parser.parse_args()
    rank, local_rank, world_size = get_ranks()

    device = get_device(local_rank)
    dist.init_process_group()
    torch.manual_seed(args.seed + rank)
    log = RunLog(args, device, enabled=rank == 0)

    train_set, val_set = shapes(1024, seed=1), shapes(501, seed=2)
    sampler = DistributedSampler(train_set, seed=args.seed)
    train_loader = make_loader(train_set, args.batch_size, device, sampler=sampler)
    val_set = Subset(val_set, range(rank, len(val_set), world_size))
    val_loader = make_loader(val_set, args.batch_size, device)

    model = Classifier().to(device)
    model.features.requires_grad_(False)
    ddp_model = DDP(model)
    optimizer = torch.optim.Adam(model.head.parameters(), args.lr)
    for epoch in range(1, args.epochs + args.finetune_epochs + 1):
        if epoch == args.epochs + 1:
            log.print("Fine-tuning: the features are trained as well")
            model.features.requires_grad_(True)
            optimizer = torch.optim.Adam(model.parameters(), args.lr / 2)
        sampler.set_epoch(epoch)
        start = time.perf_counter()
        train_metrics = train(
            ddp_model, log.progress(train_loader, "training"), optimizer, device
        )
        seconds = time.perf_counter() - start
        val_metrics = evaluate(model, val_loader, device)
        metrics = {"train": train_metrics, "validation": val_metrics}
        log.epoch(epoch, len(train_set), seconds, **metrics)
    log.write_result(accuracy=val_metrics["accuracy"])
    dist.destroy_process_group()


if __name__ == "__main__":
    run(main)
