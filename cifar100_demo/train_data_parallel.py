"""DataParallel: ResNet-152 on CIFAR-100, one process for all GPUs.

    sbatch run_single_cifar.sh             # train_cifar100.py: one GPU
    sbatch run_data_parallel_cifar100.sh   # train_data_parallel.py: DataParallel
    sbatch run_ddp_cifar100.sh             # train_ddp_cifar100.py: DDP

Without a GPU, the run script adds the options in small.txt, a small ResNet and few
steps: on a CPU core a step of ResNet-152 takes minutes.
"""

import argparse
import time
from functools import partial

import torch
from torch import nn, optim
from torch.nn import functional as F
from torch.profiler import profile, schedule
from torch.utils.data import RandomSampler
from torch.utils.tensorboard import SummaryWriter
from torchvision import models

from common.data import make_loader, normalise
from common.device import DTYPES, get_device, pick_dtype
from common.errors import positive, run
from common.log import RunLog, peak_memory
from common.metrics import batch_sums, to_metrics
from dataset import MEAN, STD, cifar100
from training_report import report_interval, report_iterations, save_profile

ARCHS = "resnet18", "resnet34", "resnet50", "resnet101", "resnet152"


class Classifier(nn.Module):
    """A ResNet for 100 classes that takes uint8 images (N, 3, 32, 32)."""

    def __init__(self, arch, image_size, dtype):
        super().__init__()
        self.resnet = models.get_model(arch, num_classes=100)
        self.image_size, self.dtype = image_size, dtype

    def forward(self, images):
        images = images.contiguous(memory_format=torch.channels_last)
        images = normalise(images, MEAN, STD)
        # The GPU resizes, because 224 x 224 floats are 196 times more bytes to copy.
        images = F.interpolate(images, self.image_size, mode="bilinear")
        amp = self.dtype is not None
        with torch.autocast(images.device.type, self.dtype, enabled=amp):
            return self.resnet(images).float()


def train(model, loader, optimizer, device, scaler, prof, log, writer):
    """Train for one epoch; return [loss_sum, correct, count] of the whole job."""
    model.train()
    steps, interval = log.args.steps, report_interval(log.args.steps)
    sums = torch.zeros(3, device=device)  # losses, correct answers, images
    recent = torch.zeros(3, device=device)  # the same, since the last report
    start = time.perf_counter()
    for step, (images, labels) in enumerate(log.progress(loader, "training"), 1):
        images = images.to(device, non_blocking=True)
        labels = labels.to(device, non_blocking=True)
        output = model(images)
        loss = F.cross_entropy(output, labels)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        recent += batch_sums(loss, output.argmax(dim=1) == labels)
        if prof:
            prof.step()
        if step % interval == 0 or step == steps:
            # Reading the sums waits for the GPU, so it happens once in many steps.
            report_iterations(log, writer, step, recent, start)
            sums += recent
            recent.zero_()
            start = time.perf_counter()
        if step == steps:
            break
    return sums


@torch.no_grad()
def evaluate(model, loader, device):
    """Return {"loss": mean, "accuracy": %}."""
    model.eval()
    sums = torch.zeros(3, device=device)  # losses, correct answers, images
    for images, labels in loader:
        images = images.to(device, non_blocking=True)
        labels = labels.to(device, non_blocking=True)
        output = model(images)
        loss = F.cross_entropy(output, labels)
        sums += batch_sums(loss, output.argmax(dim=1) == labels)
    return to_metrics(sums)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--arch", choices=ARCHS, default="resnet152", help="ResNet")
    parser.add_argument("--batch-size", type=int, default=128, help="images per GPU")
    parser.add_argument("--epochs", type=positive, default=4, help="epochs")
    # At 32 pixels the last feature maps are 1 x 1, so BatchNorm, which needs two
    # values per channel, fails on a batch of one image.
    parser.add_argument("--image-size", type=int, default=224, help="pixels a side")
    parser.add_argument("--workers", type=int, default=0, help="loader processes")
    parser.add_argument("--amp", action="store_true", help="mixed precision")
    parser.add_argument("--dtype", choices=DTYPES, help="autocast dtype")
    parser.add_argument("--steps", type=positive, help="steps per epoch; None: all")
    parser.add_argument(
        "--profile",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="profile of three steps",
    )
    parser.add_argument("--seed", type=int, default=0, help="random seed")
    args = parser.parse_args()
    gpus = max(1, torch.accelerator.device_count())  # DP: one process for all GPUs

    device = get_device()
    torch.set_float32_matmul_precision("high")  # allow TF32, as convolutions do
    torch.manual_seed(args.seed)

    train_set, val_set = cifar100()
    amp = args.amp or args.dtype
    dtype = pick_dtype(device, args.dtype) if amp else None
    scaler = torch.GradScaler(device.type, enabled=dtype == torch.float16)
    model = Classifier(args.arch, args.image_size, dtype)
    model = model.to(device, memory_format=torch.channels_last)
    log = RunLog(args, device, model, gpus)  # DP: counts all GPUs
    writer = SummaryWriter(log.folder)
    log.print(f"Autocast dtype: {dtype}")
    batch_size = args.batch_size * gpus  # DP: split over all GPUs
    dp_model = nn.DataParallel(model)  # DP: copied to all GPUs in every step
    sampler = RandomSampler(train_set)
    loader = make_loader(
        train_set, batch_size, device, sampler=sampler, num_workers=args.workers
    )
    val_loader = make_loader(val_set, batch_size, device, num_workers=args.workers)
    args.steps = min(args.steps or len(loader), len(loader))
    optimizer = optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    prof = None
    if args.profile:  # skip 3 steps, warm up in 2, record 3
        prof = profile(
            schedule=schedule(wait=3, warmup=2, active=3, repeat=1),
            on_trace_ready=partial(save_profile, log),
            acc_events=True,
        )
        prof.start()
    training_start = time.perf_counter()
    for epoch in range(1, args.epochs + 1):
        epoch_start = time.perf_counter()
        # DP: train with the wrapper, which splits the batch
        sums = train(dp_model, loader, optimizer, device, scaler, prof, log, writer)
        seconds = time.perf_counter() - epoch_start
        batches = log.progress(val_loader, "validation")
        val_metrics = evaluate(model, batches, device)
        train_metrics = to_metrics(sums, check_finite=True)
        figures = {
            "ms": 1000 * seconds / args.steps,
            "GB": peak_memory(device) / 1e9,
        }
        parts = {"step": figures, "train": train_metrics, "validation": val_metrics}
        images = int(sums[2])
        log.epoch(epoch, images, seconds, **parts)
        if writer:  # the same figures as curves in TensorBoard
            writer.add_scalar("images_per_second", images / seconds, epoch)
            for part, values in parts.items():
                for key, value in values.items():
                    writer.add_scalar(f"{part}/{key}", value, epoch)
    training_seconds = time.perf_counter() - training_start
    if prof:
        prof.stop()
    if writer:
        writer.close()
    log.print(f"Total training time: {training_seconds:.1f} s")
    log.write_result(val_metrics["accuracy"], training_seconds)


if __name__ == "__main__":
    run(main)
