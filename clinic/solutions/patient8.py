"""Train a CNN with DDP; validate after every second epoch.

    sbatch run-2gpus.sh patient8.py

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
from dataset import MEAN, STD, shapes


class Trainer:
    """The model, its optimizer, and the data of this rank."""

    def __init__(self, args, device, rank, world_size):
        self.device, self.rank = device, rank
        self.train_set, val_set = shapes(1536, seed=7), shapes(501, seed=8)
        self.sampler = DistributedSampler(self.train_set, seed=args.seed)
        self.train_loader = make_loader(
            self.train_set, args.batch_size, device, sampler=self.sampler
        )
        val_shard = Subset(val_set, range(rank, len(val_set), world_size))
        self.val_loader = make_loader(val_shard, args.batch_size, device)
        self.model = nn.Sequential(
            *(nn.Conv2d(3, 16, 3, stride=2, padding=1), nn.GroupNorm(4, 16)),
            *(nn.ReLU(), nn.Conv2d(16, 48, 3, stride=2, padding=1), nn.ReLU()),
            *(nn.Conv2d(48, 48, 3, stride=2, padding=1), nn.ReLU()),
            *(nn.Flatten(), nn.Linear(48 * 4 * 4, 4)),
        ).to(device)
        self.ddp_model = DDP(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), args.lr)

    def forward(self, model, images, labels):
        """Return the loss of a batch, and [loss_sum, correct, count]."""
        labels = labels.to(self.device, non_blocking=True)
        images = images.to(self.device, non_blocking=True)
        output = model(normalise(images, MEAN, STD))
        loss = cross_entropy(output, labels)
        return loss, batch_sums(loss, output.argmax(dim=1) == labels)

    def train(self, epoch, log):
        self.sampler.set_epoch(epoch)
        total = torch.zeros(3, device=self.device)
        for images, labels in log.progress(self.train_loader, "training"):
            loss, sums = self.forward(self.ddp_model, images, labels)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            total += sums
        return self.to_metrics(total)

    @torch.no_grad()
    def evaluate(self):
        total = torch.zeros(3, device=self.device)
        for images, labels in self.val_loader:
            total += self.forward(self.model, images, labels)[1]
        return self.to_metrics(total)

    def to_metrics(self, sums):
        dist.all_reduce(sums)
        return to_metrics(sums)

    def fit(self, epochs, every, log):
        """Train for `epochs` epochs; return the last validation accuracy in %."""
        accuracy = None
        for epoch in range(1, epochs + 1):
            start = time.perf_counter()
            train_metrics = self.train(epoch, log)
            seconds = time.perf_counter() - start
            log.epoch(epoch, len(self.train_set), seconds, train=train_metrics)
            if epoch % every == 0:  # FIX: all ranks call all_reduce
                accuracy = self.evaluate()["accuracy"]
                log.print(f"Validation: accuracy {accuracy:.2f} %")
        return accuracy


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=positive, default=6, help="epochs")
    parser.add_argument("--validate-every", type=int, default=2, help="in epochs")
    parser.add_argument("--batch-size", type=int, default=32, help="images per GPU")
    parser.add_argument("--lr", type=float, default=0.002, help="learning rate")
    parser.add_argument("--seed", type=int, default=0, help="random seed")
    args = parser.parse_args()
    rank, local_rank, world_size = get_ranks()

    device = get_device(local_rank)
    dist.init_process_group(timeout=timedelta(seconds=30))  # ends a hang soon
    torch.manual_seed(args.seed + rank)
    log = RunLog(args, device, enabled=rank == 0)
    trainer = Trainer(args, device, rank, world_size)
    accuracy = trainer.fit(args.epochs, args.validate_every, log)
    log.write_result(accuracy=accuracy)
    dist.destroy_process_group()


if __name__ == "__main__":
    run(main)
