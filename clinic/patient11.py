"""Train a small CNN with DDP; each rank updates a part of the weights, as in ZeRO.

    sbatch run-2gpus.sh patient11.py

It runs without a GPU.
"""

import argparse
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DistributedSampler, Subset

from common.data import make_loader, normalise
from common.device import get_device, get_ranks
from common.errors import positive, run
from common.log import RunLog
from common.metrics import batch_sums, to_metrics
from dataset import MEAN, SHAPES, STD, shapes


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


def train(model, loader, optimizer, device, my_parameters):
    """Train for an epoch; return {"loss": mean, "accuracy": %}.

    my_parameters: the parameters that this rank's optimizer updates.
    """
    model.train()
    sums = torch.zeros(3, device=device)  # losses, correct answers, count
    for images, labels in loader:
        images = images.to(device, non_blocking=True)
        labels = labels.to(device, non_blocking=True)
        output = model(normalise(images, MEAN, STD))
        loss = cross_entropy(output, labels)
        model.zero_grad()
        loss.backward()
        clip_grad_norm_(my_parameters, 0.5)
        optimizer.step()
        for i, p in enumerate(model.parameters()):
            dist.broadcast(p.detach(), i % dist.get_world_size())  # from its owner
        sums += batch_sums(loss, output.argmax(dim=1) == labels)
    dist.all_reduce(sums)
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
    dist.all_reduce(sums)
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
    torch.manual_seed(args.seed + rank)

    train_set, val_set = shapes(2048, seed=1), shapes(501, seed=2)
    sampler = DistributedSampler(train_set, seed=args.seed)
    train_loader = make_loader(train_set, args.batch_size, device, sampler=sampler)
    val_shard = Subset(val_set, range(rank, len(val_set), world_size))
    val_loader = make_loader(val_shard, args.batch_size, device)

    model = Net().to(device)
    ddp_model = DDP(model)
    my_parameters = [*model.parameters()][rank::world_size]
    optimizer = torch.optim.Adam(my_parameters, args.lr)
    log = RunLog(args, device, enabled=rank == 0)
    for epoch in range(1, args.epochs + 1):
        sampler.set_epoch(epoch)
        start = time.perf_counter()
        batches = log.progress(train_loader, "training")
        train_metrics = train(ddp_model, batches, optimizer, device, my_parameters)
        seconds = time.perf_counter() - start
        val_metrics = evaluate(model, val_loader, device)
        metrics = {"train": train_metrics, "validation": val_metrics}
        log.epoch(epoch, len(train_set), seconds, **metrics)
    log.write_result(accuracy=val_metrics["accuracy"])
    dist.destroy_process_group()


if __name__ == "__main__":
    run(main)
