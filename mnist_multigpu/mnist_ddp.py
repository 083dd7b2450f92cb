"""MNIST with a small CNN: one GPU, DataParallel, or DistributedDataParallel (DDP).

    sbatch slurm_singlegpu.sh    # mnist_singlegpu.py: one GPU
    sbatch slurm_multigpu.sh     # mnist_multigpu.py: DataParallel, line profile
    sbatch slurm_ddp.sh          # mnist_ddp.py: DDP

Without a GPU, add $SMALL (set by `source common/env.sh`): few epochs.
"""

import time

import torch
import torch.distributed as dist  # DDP: communication between processes
from line_profiler import profile
from torch import nn, optim
from torch.nn import functional as F
from torch.optim import lr_scheduler
from torch.utils.data import DistributedSampler, Subset  # DDP: shards of the data

from common.checkpoint import check_writable, save_atomically
from common.cli import OptionParser, at_least
from common.data import make_loader, normalise
from common.device import get_device, get_ranks  # DDP: the ranks
from common.log import RunLog, rank0_print
from common.metrics import batch_sums, check_finite, to_metrics
from dataset import MEAN, STD, mnist

# Each optimizer's usual learning rate, unless --lr is given.
OPTIMIZERS = {
    "adadelta": lambda parameters, lr: optim.Adadelta(parameters, lr or 1.0),
    "adam": lambda parameters, lr: optim.Adam(parameters, lr or 0.001),
    "rmsprop": lambda parameters, lr: optim.RMSprop(parameters, lr or 0.001),
}
SCHEDULERS = {
    "step": lambda opt, args: lr_scheduler.StepLR(opt, 1, args.gamma),
    "exponential": lambda opt, args: lr_scheduler.ExponentialLR(opt, args.gamma),
    "cosine": lambda opt, args: lr_scheduler.CosineAnnealingLR(opt, args.epochs),
}


class Net(nn.Module):
    """A CNN: digits (N, 1, 28, 28) in, log-probabilities (N, 10) out."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 3)  # 32 filters of 3 x 3: (N, 32, 26, 26)
        self.conv2 = nn.Conv2d(32, 64, 3)  # 64 filters over all 32: (N, 64, 24, 24)
        self.dropout1 = nn.Dropout(0.25)  # zeroes a random quarter in training
        self.fc1 = nn.Linear(9216, 128)  # 64 x 12 x 12 inputs: 98 % of the weights
        self.dropout2 = nn.Dropout(0.5)  # zeroes a random half of the 128
        self.fc2 = nn.Linear(128, 10)  # a score for each digit

    def forward(self, x):
        x = F.relu(self.conv1(x))
        x = F.max_pool2d(self.conv2(x), 2)  # the largest of 2 x 2: (N, 64, 12, 12)
        x = F.relu(x)  # the same as before pooling, at a quarter of the work
        x = self.dropout1(x).flatten(1)
        x = F.relu(self.fc1(x))
        x = self.fc2(self.dropout2(x))
        return F.log_softmax(x, dim=1)  # log-probabilities, as nll_loss expects


@profile
def train(args, model, device, train_loader, optimizer, epoch, log):
    """Train for one epoch; return when the device has finished."""
    model.train()
    images, batches = len(train_loader.dataset), len(train_loader)
    for batch, (data, target) in enumerate(log.progress(train_loader), start=1):
        data = data.to(device, non_blocking=True)
        target = target.to(device, non_blocking=True)
        output = model(normalise(data, MEAN, STD))
        loss = F.nll_loss(output, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if batch % args.log_interval == 0 or batch == batches:
            loss = loss.detach() / dist.get_world_size()  # DDP: a part of the mean
            dist.all_reduce(loss)  # DDP: the sum over all ranks
            seen = min(batch * log.batch, images)
            progress = f"{seen}/{images} ({seen / images:.0%})"
            # item() waits for the device: do not call it in every step.
            loss = check_finite(loss.item())
            log.print(f"Train Epoch: {epoch} [{progress}]\tLoss: {loss:.6f}")


@torch.no_grad()
@profile
def test(model, device, test_loader):
    """Return the mean loss and the accuracy in %."""
    model.eval()
    sums = torch.zeros(3, device=device)
    for data, target in test_loader:
        data = data.to(device, non_blocking=True)
        target = target.to(device, non_blocking=True)
        output = model(normalise(data, MEAN, STD))
        loss = F.nll_loss(output, target)
        sums += batch_sums(loss, output.argmax(dim=1) == target)
    dist.all_reduce(sums)  # DDP: the sum over all ranks
    tested = to_metrics(sums)
    correct, images = map(int, sums[1:].tolist())
    line = f"Test set: Average loss: {tested['loss']:.4f}, "
    rank0_print(f"{line}Accuracy: {correct}/{images} ({tested['accuracy']:.0f} %)")
    return tested


def main():
    parser = OptionParser(__doc__)
    add = parser.add_argument
    add("--batch-size", type=at_least(1), default=64, help="images per GPU")
    add("--test-batch-size", type=at_least(1), default=1000, help="test batch size")
    add("--epochs", type=at_least(1), default=14, help="epochs")
    add("--optimizer", choices=OPTIMIZERS, default="adadelta", help="optimizer")
    text = "learning rate (default: 1 for adadelta, else 0.001)"
    add("--lr", type=at_least(0.0), help=text)
    add("--scheduler", choices=SCHEDULERS, default="step", help="schedule of --lr")
    add("--gamma", type=at_least(0.0), default=0.7, help="decay factor of --lr")
    text = "steps between log lines"
    add("--log-interval", type=at_least(1), default=10, help=text)
    add("--workers", type=at_least(0), default=0, help="loader processes")
    add("--save-model", action="store_true", help="save the weights in mnist_cnn.pt")
    add("--seed", type=int, default=0, help="random seed")
    args = parser.parse_args()
    if args.save_model:
        check_writable("mnist_cnn.pt")
    rank, local_rank, world_size = get_ranks()  # DDP: torchrun numbers the processes

    device = get_device(local_rank)  # DDP: local_rank picks the GPU of this node
    torch.manual_seed(args.seed + rank)  # DDP: each rank has its own random numbers
    profile.output_prefix = f"logs/rank{rank}"  # DDP: a line profile per rank
    dist.init_process_group()  # DDP: NCCL or RCCL on GPUs, Gloo on CPUs

    train_set, test_set = mnist()
    model = Net().to(device, memory_format=torch.channels_last)
    log = RunLog(args, device)
    ddp_model = torch.nn.parallel.DistributedDataParallel(model)  # DDP: kept in sync
    log.print(f"Train set size: {len(train_set)}")
    log.print(f"Test set size: {len(test_set)}")

    test_shard = range(rank, len(test_set), world_size)  # DDP: this rank's images
    test_set = Subset(test_set, test_shard)  # DDP: none is counted twice
    batch_size = args.batch_size
    sampler = DistributedSampler(train_set, seed=args.seed)  # DDP: a shard per rank
    loader = make_loader(
        train_set, batch_size, device, sampler=sampler, workers=args.workers
    )
    test_loader = make_loader(test_set, args.test_batch_size, device)
    optimizer = OPTIMIZERS[args.optimizer](model.parameters(), args.lr)
    scheduler = SCHEDULERS[args.scheduler](optimizer, args)
    start = time.perf_counter()
    for epoch in range(1, args.epochs + 1):
        sampler.set_epoch(epoch)  # DDP: a new order in each epoch
        epoch_start = time.perf_counter()
        train(args, ddp_model, device, loader, optimizer, epoch, log)  # DDP: wrapped
        seconds = time.perf_counter() - epoch_start
        tested = test(model, device, log.progress(test_loader))
        log.epoch(epoch, len(train_set), seconds, test=tested)
        scheduler.step()
    training = time.perf_counter() - start
    log.print(f"Total training time: {training:.1f} s")
    if args.save_model and rank == 0:  # DDP: one process writes
        save_atomically(model.state_dict(), "mnist_cnn.pt")
    log.write_result(accuracy=tested["accuracy"], training_seconds=training)
    dist.destroy_process_group()  # DDP: closes what init_process_group opened


if __name__ == "__main__":
    main()
