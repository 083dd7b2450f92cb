"""Train a CNN with DDP on three quarters of a data set; validate on the rest.

    sbatch run-2gpus.sh patient4.py

It runs without a GPU.
"""

import argparse
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, relu
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DistributedSampler, Subset, random_split

from common.data import make_loader
from common.device import get_device, get_ranks
from common.errors import positive, run
from common.log import RunLog
from common.metrics import batch_sums, to_metrics
from dataset import shapes


class Net(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 5, stride=2)
        self.conv2 = nn.Conv2d(width, 2 * width, 5, stride=2)
        self.fc1 = nn.Linear(2 * width * 5 * 5, 128)
        self.fc2 = nn.Linear(128, 4)
        self.dropout = nn.Dropout(0.1)

    def forward(self, images):
        x = images.float().div(127.5).sub(1)
        x = relu(self.conv2(relu(self.conv1(x)))).flatten(1)
        return self.fc2(self.dropout(relu(self.fc1(x))))


parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
parser.add_argument("--epochs", type=positive, default=15, help="epochs")
parser.add_argument("--batch-size", type=int, default=16, help="images per GPU")
parser.add_argument("--images", type=int, default=640, help="images in the data set")
parser.add_argument(
    "--width", type=int, default=32, help="channels of the first layer"
)
parser.add_argument("--lr", type=float, default=0.001, help="learning rate")
parser.add_argument("--seed", type=int, default=0, help="random seed")


def main():
    args = parser.parse_args()
    rank, local_rank, world_size = get_ranks()
    device = get_device(local_rank)
    dist.init_process_group()
    torch.manual_seed(args.seed + rank)  # dropout differs between ranks

    # Data: three quarters for training, one quarter for validation
    full_set = shapes(args.images)
    train_set, val_set = random_split(full_set, [0.75, 0.25])
    sampler = DistributedSampler(train_set, seed=args.seed)
    train_loader = make_loader(train_set, args.batch_size, device, sampler=sampler)
    val_shard = range(rank, len(val_set), world_size)
    val_loader = make_loader(Subset(val_set, val_shard), args.batch_size, device)

    # Model
    model = Net(args.width).to(device)
    ddp_model = DDP(model)
    optimizer = torch.optim.AdamW(model.parameters(), args.lr, weight_decay=0.01)

    log = RunLog(args, device, enabled=rank == 0)
    log.print(f"{len(train_set)} training images, {len(val_set)} validation images")
    for epoch in range(1, args.epochs + 1):
        start = time.perf_counter()
        sampler.set_epoch(epoch)
        ddp_model.train()
        train_sums = torch.zeros(3, device=device)  # losses, correct answers, count
        for images, labels in log.progress(train_loader, "training"):
            images = images.to(device, non_blocking=True)
            labels = labels.to(device, non_blocking=True)
            output = ddp_model(images)
            loss = cross_entropy(output, labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            train_sums += batch_sums(loss, output.argmax(dim=1) == labels)
        dist.all_reduce(train_sums)
        train_metrics = to_metrics(train_sums)
        seconds = time.perf_counter() - start

        model.eval()
        val_sums = torch.zeros(3, device=device)  # losses, correct answers, count
        with torch.no_grad():
            for images, labels in val_loader:
                images = images.to(device, non_blocking=True)
                labels = labels.to(device, non_blocking=True)
                output = model(images)
                loss = cross_entropy(output, labels)
                val_sums += batch_sums(loss, output.argmax(dim=1) == labels)
        dist.all_reduce(val_sums)
        val_metrics = to_metrics(val_sums)
        metrics = {"train": train_metrics, "validation": val_metrics}
        log.epoch(epoch, len(train_set), seconds, **metrics)

    log.write_result(accuracy=val_metrics["accuracy"])
    dist.destroy_process_group()


if __name__ == "__main__":
    run(main)
