"""Train a small CNN with tensor parallelism to classify four shapes.

    sbatch run-2gpus.sh patient10.py

It runs without a GPU.
"""

import argparse
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import parallel as tp
from torch.nn.functional import cross_entropy

from common.data import make_loader, normalise
from common.device import get_device, get_ranks
from common.errors import positive, run
from common.log import RunLog
from common.metrics import batch_sums, to_metrics
from dataset import MEAN, SHAPES, STD, shapes


class Net(nn.Module):
    """A CNN; each rank has all convolutions, and a part of the linear layers."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 16, 3, stride=2, padding=1)
        self.conv2 = nn.Conv2d(16, 32, 3, stride=2, padding=1)
        self.conv3 = nn.Conv2d(32, 64, 3, stride=2, padding=1)
        self.hidden = nn.Linear(64 * 4 * 4, 16)
        self.head = nn.Linear(16, len(SHAPES))

    def forward(self, x):
        x = self.conv1(x).relu()
        x = self.conv2(x).relu()
        x = self.conv3(x).relu()
        x = self.hidden(x.flatten(1)).relu()
        return self.head(x)

    def init_weights(self, seed, rank, device):
        """Draw the weights: a model that was built on "meta" has none."""
        whole, shard = torch.Generator(device), torch.Generator(device)
        whole.manual_seed(seed)
        shard.manual_seed(seed)
        for p in self.parameters():
            local = p.to_local() if isinstance(p, DTensor) else p
            rng = shard if isinstance(p, DTensor) else whole
            if p.dim() == 1:  # a bias
                nn.init.zeros_(local)
            else:
                nn.init.kaiming_uniform_(local, a=5**0.5, generator=rng)


def train(model, loader, optimizer, device):
    """Train for an epoch; return {"loss": mean, "accuracy": %}."""
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
    return to_metrics(sums, check_finite=True)


@torch.no_grad()
def evaluate(model, loader, device):
    """Return {"loss": mean, "accuracy": %}."""
    model.eval()
    sums = torch.zeros(3, device=device)  # losses, correct answers, count
    for images, labels in loader:
        images = images.to(device, non_blocking=True)
        labels = labels.to(device, non_blocking=True)
        output = model(normalise(images, MEAN, STD))
        loss = cross_entropy(output, labels)
        sums += batch_sums(loss, output.argmax(dim=1) == labels)
    return to_metrics(sums)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=positive, default=6, help="epochs")
    parser.add_argument("--batch-size", type=int, default=32, help="images per GPU")
    parser.add_argument("--lr", type=float, default=0.003, help="learning rate")
    parser.add_argument("--seed", type=int, default=0, help="random seed")
    args = parser.parse_args()
    rank, local_rank, world_size = get_ranks()

    device = get_device(local_rank)
    dist.init_process_group()
    torch.manual_seed(args.seed)  # all ranks train on the same batches

    train_set, val_set = shapes(2048, seed=1), shapes(501, seed=2)
    batch_size = args.batch_size * world_size
    train_loader = make_loader(train_set, batch_size, device, shuffle=True)
    val_loader = make_loader(val_set, batch_size, device)

    with torch.device("meta"):
        model = Net()
    mesh = dist.init_device_mesh(device.type, (world_size,))
    plan = {"hidden": tp.ColwiseParallel(), "head": tp.RowwiseParallel()}
    tp.parallelize_module(model, mesh, plan)
    model.to_empty(device=device)
    model.init_weights(args.seed, rank, device)
    optimizer = torch.optim.Adam(model.parameters(), args.lr, foreach=False)
    log = RunLog(args, device, enabled=rank == 0)
    for epoch in range(1, args.epochs + 1):
        start = time.perf_counter()
        train_metrics = train(
            model, log.progress(train_loader, "training"), optimizer, device
        )
        seconds = time.perf_counter() - start
        val_metrics = evaluate(model, val_loader, device)
        metrics = {"train": train_metrics, "validation": val_metrics}
        log.epoch(epoch, len(train_set), seconds, **metrics)
    log.write_result(accuracy=val_metrics["accuracy"])
    dist.destroy_process_group()


if __name__ == "__main__":
    run(main)
