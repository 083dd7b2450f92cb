"""DDP: MNIST with a small CNN, one process per GPU.

    sbatch slurm_singlegpu.sh    # mnist_singlegpu.py: one GPU
    sbatch slurm_multigpu.sh     # mnist_multigpu.py: DataParallel
    sbatch slurm_ddp.sh          # mnist_ddp.py: DDP

Without a GPU, the run scripts add the options in small.txt: few epochs.
"""

import argparse
import os
import time

import torch
import torch.distributed as dist  # DDP: communication between processes
from line_profiler import profile
from torch import nn, optim
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP  # DDP: wraps a model
from torch.optim import lr_scheduler
from torch.utils.data import DistributedSampler, Subset  # DDP: shards of the data

from common.data import make_loader, normalise
from common.device import get_device, get_ranks  # DDP: reads torchrun's variables
from common.errors import positive, run
from common.log import RunLog
from common.metrics import batch_sums, to_metrics
from dataset import MEAN, STD, mnist

OPTIMIZERS = {
    "adadelta": optim.Adadelta,
    "adam": optim.Adam,
    "rmsprop": optim.RMSprop,
}
LEARNING_RATES = {"adadelta": 1.0, "adam": 0.001, "rmsprop": 0.001}
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
        x = F.relu(self.conv2(x))
        x = F.max_pool2d(x, 2)  # the largest of 2 x 2: (N, 64, 12, 12)
        x = self.dropout1(x).flatten(1)
        x = F.relu(self.fc1(x))
        x = self.fc2(self.dropout2(x))
        return F.log_softmax(x, dim=1)  # log-probabilities, as nll_loss expects


@profile
def train(args, model, device, train_loader, optimizer, epoch, log):
    """Train for one epoch; the last loss.item() waits for the device."""
    model.train()
    images, num_steps = len(train_loader.dataset), len(train_loader)
    batches = log.progress(train_loader, "training")
    for step, (data, target) in enumerate(batches, start=1):
        data = data.to(device, non_blocking=True)
        target = target.to(device, non_blocking=True)
        # Forward: each digit's log-probabilities, and how wrong they are.
        output = model(normalise(data, MEAN, STD))
        loss = F.nll_loss(output, target)
        # Backward: how each weight changes the loss. Then the optimizer moves all
        # weights by a small step that lowers it. Uncleared gradients would add up.
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % args.log_interval == 0 or step == num_steps:
            loss = loss.detach()  # DDP: the sum needs no gradient
            dist.all_reduce(loss)  # DDP: the sum over all ranks
            loss = loss / dist.get_world_size()  # DDP: the mean of the ranks' losses
            seen = min(step * log.global_batch, images)
            progress = f"{seen}/{images} ({seen / images:.0%})"
            loss = loss.item()  # .item() waits for the GPU: not in every step
            log.print(f"Train Epoch: {epoch} [{progress}]\tLoss: {loss:.6f}")


@torch.no_grad()  # no backward pass follows, so nothing is kept for one
@profile
def test(model, device, test_loader, log):
    """Return {"loss": mean, "accuracy": %}."""
    model.eval()  # without dropout, which only helps in training
    sums = torch.zeros(3, device=device)  # losses, correct answers, images
    for data, target in test_loader:
        data = data.to(device, non_blocking=True)
        target = target.to(device, non_blocking=True)
        output = model(normalise(data, MEAN, STD))
        loss = F.nll_loss(output, target)  # the mean over this batch
        # The answer is the digit with the largest log-probability. The sums stay on
        # the GPU, because reading them in every batch would make the CPU wait.
        sums += batch_sums(loss, output.argmax(dim=1) == target)
    dist.all_reduce(sums)  # DDP: the sum over all ranks
    test_metrics = to_metrics(sums)  # waits until the GPU has tested all batches
    correct, images = map(int, sums[1:].tolist())
    log.print(
        f"Test set: Average loss: {test_metrics['loss']:.4f}, "
        f"Accuracy: {correct}/{images} ({test_metrics['accuracy']:.0f} %)"
    )
    return test_metrics


def main():
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--batch-size", type=int, default=64, help="images per GPU")
    parser.add_argument(
        "--test-batch-size", type=int, default=1000, help="test batch size"
    )
    parser.add_argument("--epochs", type=positive, default=14, help="epochs")
    parser.add_argument(
        "--optimizer", choices=OPTIMIZERS, default="adadelta", help="optimizer"
    )
    parser.add_argument(
        "--lr", type=float, help="learning rate; None: 1.0 for adadelta, else 0.001"
    )
    parser.add_argument(
        "--scheduler", choices=SCHEDULERS, default="step", help="schedule of --lr"
    )
    parser.add_argument("--gamma", type=float, default=0.7, help="decay of --lr")
    parser.add_argument(
        "--log-interval", type=positive, default=10, help="steps per log line"
    )
    parser.add_argument("--workers", type=int, default=0, help="loader processes")
    parser.add_argument(
        "--save-model", action="store_true", help="save the weights in mnist_cnn.pt"
    )
    parser.add_argument("--seed", type=int, default=0, help="random seed")
    args = parser.parse_args()
    rank, local_rank, world_size = get_ranks()  # DDP: torchrun numbers the processes

    device = get_device(local_rank)  # DDP: local_rank picks the GPU of this node
    torch.set_float32_matmul_precision("high")  # allow TF32, as convolutions do
    # For slurm_ddp.sh: with LINE_PROFILE=1 every process writes a profile to logs/.
    profile.output_prefix = f"logs/rank{os.environ.get('RANK', 0)}"
    profile.write_config |= {"stdout": False, "timestamped_text": False}
    torch.manual_seed(args.seed + rank)  # DDP: each rank has its own random numbers
    dist.init_process_group()  # DDP: NCCL or RCCL on GPUs, Gloo on CPUs

    train_set, test_set = mnist()  # uint8 in memory, made float on the GPU
    # channels_last is the order in memory that convolutions on tensor cores read.
    model = Net().to(device, memory_format=torch.channels_last)
    log = RunLog(args, device, model, enabled=rank == 0)  # DDP: only rank 0 logs
    ddp_model = DDP(model)  # DDP: copies rank 0's weights, averages gradients
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "not set")
    log.print(f"CUDA_VISIBLE_DEVICES: {visible}")  # Slurm sets it to the job's GPUs
    log.print(f"Train set size: {len(train_set)}")
    log.print(f"Test set size: {len(test_set)}")

    batch_size = args.batch_size
    # DDP: each rank trains on its own shard, and evaluates every world_size-th image
    sampler = DistributedSampler(train_set, seed=args.seed)
    test_set = Subset(test_set, range(rank, len(test_set), world_size))
    loader = make_loader(  # makes batches of the digits in the sampler's order
        train_set, batch_size, device, sampler=sampler, num_workers=args.workers
    )
    test_loader = make_loader(test_set, args.test_batch_size, device)
    lr = LEARNING_RATES[args.optimizer] if args.lr is None else args.lr
    optimizer = OPTIMIZERS[args.optimizer](model.parameters(), lr)
    scheduler = SCHEDULERS[args.scheduler](optimizer, args)
    start = time.perf_counter()
    for epoch in range(1, args.epochs + 1):
        sampler.set_epoch(epoch)  # DDP: a new order in every epoch
        epoch_start = time.perf_counter()
        # DDP: train with the wrapper, which averages gradients
        train(args, ddp_model, device, loader, optimizer, epoch, log)
        seconds = time.perf_counter() - epoch_start  # without the test
        batches = log.progress(test_loader, "test")
        test_metrics = test(model, device, batches, log)
        log.epoch(epoch, len(train_set), seconds, test=test_metrics)
        scheduler.step()  # sets the learning rate of the next epoch
    training_seconds = time.perf_counter() - start
    log.print(f"Total training time: {training_seconds:.1f} s")
    if args.save_model and rank == 0:  # DDP: only rank 0 writes
        torch.save(model.state_dict(), "mnist_cnn.pt.part")
        os.replace("mnist_cnn.pt.part", "mnist_cnn.pt")  # never half a file
    accuracy, profiled = test_metrics["accuracy"], profile.enabled
    log.write_result(accuracy, training_seconds, profiled=profiled)
    dist.destroy_process_group()  # DDP: closes what init_process_group opened


if __name__ == "__main__":
    run(main)
