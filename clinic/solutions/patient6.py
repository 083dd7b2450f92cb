"""Train a CNN with DDP, save checkpoints, and resume from them.

    sbatch run-2gpus.sh patient6.py --epochs 5
    sbatch run-2gpus.sh patient6.py --epochs 8 --resume

Each epoch ends with a checkpoint in logs/patient6.pt.
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DistributedSampler, Subset

from common.data import make_loader, normalise
from common.device import get_device, get_ranks
from common.errors import UserError, positive, run
from common.metrics import batch_sums, to_metrics
from dataset import MEAN, STD, shapes


class Checkpoint:
    """A file with the number of finished epochs and the state of each part."""

    def __init__(self, file, enabled=True, **parts):
        self.file, self.enabled, self.parts = file, enabled, parts

    def save(self, epoch):
        if not self.enabled:
            return
        state = {name: part.state_dict() for name, part in self.parts.items()}
        os.makedirs(os.path.dirname(self.file), exist_ok=True)
        torch.save(state | {"epoch": epoch}, self.file)

    def load(self):
        """Load the parts; return the number of finished epochs."""
        if not os.path.isfile(self.file):
            raise UserError(f"no {self.file}; start again without --resume")
        state = torch.load(self.file, map_location="cpu", weights_only=True)
        for name, part in self.parts.items():
            if name not in state:
                raise UserError(f"no {name} in {self.file}; start without --resume")
            part.load_state_dict(state[name])
        return state["epoch"]


def batch_loss(model, images, labels, device):
    """Return the loss of a batch, and which images were classified correctly."""
    labels = labels.to(device, non_blocking=True)
    images = normalise(images.to(device, non_blocking=True), MEAN, STD)
    output = model(images)
    return cross_entropy(output, labels), output.argmax(dim=1) == labels


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=positive, default=8, help="epochs")
    parser.add_argument("--batch-size", type=int, default=16, help="images per GPU")
    parser.add_argument("--lr", type=float, default=0.003, help="learning rate")
    parser.add_argument("--resume", action="store_true", help="from the checkpoint")
    parser.add_argument("--seed", type=int, default=0, help="random seed")
    args = parser.parse_args()
    rank, local_rank, world_size = get_ranks()

    device = get_device(local_rank)
    dist.init_process_group()
    torch.manual_seed(args.seed + rank)
    train_set, val_set = shapes(1024, seed=5), shapes(501, seed=6)
    sampler = DistributedSampler(train_set, seed=args.seed)
    train_loader = make_loader(train_set, args.batch_size, device, sampler=sampler)
    val_set = Subset(val_set, range(rank, len(val_set), world_size))
    val_loader = make_loader(val_set, args.batch_size, device)

    model = nn.Sequential(
        *(nn.Conv2d(3, 16, 3, stride=2, padding=1), nn.GELU()),
        *(nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.GELU()),
        *(nn.Conv2d(32, 64, 3, stride=2, padding=1), nn.GELU()),
        *(nn.Flatten(), nn.Linear(64 * 4 * 4, 4)),
    ).to(device)
    optimizer = torch.optim.Adam(model.parameters(), args.lr)
    parts = {"model": model, "optimizer": optimizer}  # FIX: saves Adam's moments
    file = "logs/patient6.pt"
    checkpoint = Checkpoint(file, rank == 0, **parts)  # FIX: only rank 0 writes
    epochs_done = checkpoint.load() if args.resume else 0
    if epochs_done >= args.epochs:
        raise UserError(f"{file} has {epochs_done} epochs; use more --epochs")
    ddp_model = DDP(model)

    for epoch in range(epochs_done + 1, args.epochs + 1):
        sampler.set_epoch(epoch)
        sums = torch.zeros(2, 3, device=device)  # for training and validation
        for images, labels in train_loader:
            loss, correct = batch_loss(ddp_model, images, labels, device)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            sums[0] += batch_sums(loss, correct)
        with torch.no_grad():
            for images, labels in val_loader:
                sums[1] += batch_sums(*batch_loss(model, images, labels, device))
        dist.all_reduce(sums)
        train_metrics, val_metrics = to_metrics(sums[0]), to_metrics(sums[1])
        line = f"Epoch {epoch}: loss {train_metrics['loss']:.4f}"
        if rank == 0:
            print(f"{line}, validation accuracy {val_metrics['accuracy']:.2f} %")
        checkpoint.save(epoch)
    dist.destroy_process_group()


if __name__ == "__main__":
    run(main)
