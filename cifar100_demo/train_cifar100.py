"""ResNet-152 on CIFAR-100: one GPU, its DataParallel and DDP counterparts.

    sbatch run_single_cifar.sh             # train_cifar100.py: one GPU
    sbatch run_data_parallel_cifar100.sh   # train_data_parallel.py: DataParallel
    sbatch run_ddp_cifar100.sh             # train_ddp_cifar100.py: DDP

Without a GPU add $SMALL, which `source common/env.sh` sets: a step of ResNet-152
takes minutes there.
"""

import time
from argparse import BooleanOptionalAction

import torch
from torch import nn, optim
from torch.nn import functional as F
from torch.profiler import profile, schedule
from torch.utils.data import RandomSampler
from torchvision import models

from common.cli import OptionParser, at_least
from common.data import make_loader, normalise
from common.device import DTYPES, get_device, pick_dtype
from common.log import RunLog, peak_memory
from common.metrics import batch_sums, to_metrics
from common.optimizer import init_momentum
from dataset import MEAN, STD, cifar100
from report import is_due, report_iterations, save_profile

ARCHS = "resnet18", "resnet34", "resnet50", "resnet101", "resnet152"


class Classifier(nn.Module):
    """A ResNet for 100 classes that takes uint8 images (N, 3, 32, 32)."""

    def __init__(self, arch, image_size, dtype):
        super().__init__()
        self.resnet = models.get_model(arch, num_classes=100)
        self.image_size, self.dtype = image_size, dtype

    def forward(self, images):
        # Here and not in the loader: resized, they would be 196 times as many bytes.
        images = images.contiguous(memory_format=torch.channels_last)
        images = normalise(images, MEAN, STD)
        images = F.interpolate(images, self.image_size, mode="bilinear")
        with torch.autocast(images.device.type, self.dtype, bool(self.dtype)):
            return self.resnet(images).float()


def train(args, model, device, train_loader, optimizer, scaler, log, profiler):
    """Train for an epoch; return its sums of loss, of right answers, of images."""
    model.train()
    total, recent = torch.zeros(2, 3, device=device)
    start = time.perf_counter()
    batches = log.progress(train_loader, args.steps)
    for step, (images, labels) in enumerate(batches, start=1):
        images = images.to(device, non_blocking=True)
        labels = labels.to(device, non_blocking=True)
        output = model(images)
        loss = F.cross_entropy(output, labels)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        recent += batch_sums(loss, output.argmax(dim=1) == labels)
        if profiler:
            profiler.step()
        if is_due(step, args.steps):
            # To read the sums waits for the device: not in every step.
            report_iterations(log, step, args.steps, recent, start)
            total += recent
            recent.zero_()
            start = time.perf_counter()
    return total


@torch.no_grad()
def evaluate(model, device, loader):
    """Return the mean loss and the accuracy in %."""
    model.eval()
    sums = torch.zeros(3, device=device)
    for images, labels in loader:
        images = images.to(device, non_blocking=True)
        labels = labels.to(device, non_blocking=True)
        output = model(images)
        loss = F.cross_entropy(output, labels)
        sums += batch_sums(loss, output.argmax(dim=1) == labels)
    return to_metrics(sums)


def main():
    parser = OptionParser(__doc__)
    add = parser.add_argument
    add("--arch", choices=ARCHS, default="resnet152", help="the net")
    add("--batch-size", type=at_least(1), default=128, help="images per GPU")
    add("--epochs", type=at_least(1), default=4, help="passes over the data")
    # At 32 pixels BatchNorm would have one value left of each channel.
    add("--image-size", type=at_least(33), default=224, help="pixels of a side")
    add("--workers", type=at_least(0), default=0, help="processes that load images")
    add("--amp", action="store_true", help="compute in 16 bits")
    add("--dtype", choices=DTYPES, help="of --amp; default: what is fast")
    add("--steps", type=at_least(1), help="of each epoch; default: all")
    add("--profile", action=BooleanOptionalAction, default=True, help="record steps")
    add("--seed", type=int, default=0, help="of all random numbers")
    args = parser.parse_args()

    device = get_device()
    torch.manual_seed(args.seed)

    train_set, val_set = cifar100()
    amp = args.amp or args.dtype
    dtype = pick_dtype(device, args.dtype) if amp else None
    scaler = torch.GradScaler(device.type, enabled=dtype == torch.float16)
    model = Classifier(args.arch, args.image_size, dtype)
    model = model.to(device, memory_format=torch.channels_last)
    log = RunLog(args, device)
    batch_size, workers = args.batch_size, args.workers
    sampler = RandomSampler(train_set)
    train_loader = make_loader(
        train_set, batch_size, device, sampler=sampler, workers=workers
    )
    val_loader = make_loader(val_set, batch_size, device, workers=workers)
    args.steps = min(args.steps or len(train_loader), len(train_loader))
    optimizer = optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=True)
    init_momentum(optimizer)
    profiler = None
    if args.profile:  # 3 steps go by, 2 warm it up, 3 are recorded
        steps = schedule(wait=3, warmup=2, active=3, repeat=1)
        profiler = profile(
            schedule=steps, on_trace_ready=save_profile, acc_events=True
        )
        profiler.start()
    start = time.perf_counter()
    for epoch in range(1, args.epochs + 1):
        epoch_start = time.perf_counter()
        sums = train(
            args, model, device, train_loader, optimizer, scaler, log, profiler
        )
        seconds = time.perf_counter() - epoch_start
        batches = log.progress(val_loader)
        validated = evaluate(model, device, batches)
        step = {"ms": 1000 * seconds / args.steps, "GB": peak_memory(device) / 1e9}
        parts = {"step": step, "train": to_metrics(sums), "validation": validated}
        log.epoch(epoch, int(sums[2]), seconds, **parts)
    training = time.perf_counter() - start
    if profiler:
        profiler.stop()
    log.print(f"Total training time: {training:.1f} s")
    log.write_result(accuracy=validated["accuracy"], training_seconds=training)


if __name__ == "__main__":
    main()
