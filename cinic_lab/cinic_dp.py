"""DataParallel: one process for all GPUs of a node.

    sbatch run.sh cinic.py   # or cinic_amp.py, cinic_tensorboard.py, cinic_wandb.py
    sbatch run-dp.sh cinic_dp.py             # DataParallel
    sbatch run-2nodes.sh cinic_ddp.py        # DDP, also with cinic_syncbn.py
    sbatch run-requeue.sh cinic_requeue.py   # DDP in a job that Slurm requeues

Without a GPU, the run script adds the options in small.txt: few, small steps.
"""

import argparse
import time

import torch
import torchvision
from torch import nn
from torch.nn import functional as F
from torch.utils.data import RandomSampler
from torch.utils.tensorboard import SummaryWriter  # TB: writes event files

from common.data import make_loader, normalise
from common.device import DTYPES, get_device, pick_dtype  # AMP: 16-bit types
from common.errors import positive, run
from common.log import RunLog
from common.metrics import batch_sums, to_metrics
from dataset import MEAN, STD, cinic, crop_and_flip
from state import TrainingState
from topk import top1_top5

ARCHS = "resnet18", "resnet34", "resnet50", "resnet101", "resnet152"


class Classifier(nn.Module):
    """A torchvision ResNet for ten classes, with random weights."""

    def __init__(self, arch, dtype=None):  # AMP: None is fp32
        super().__init__()
        self.dtype = dtype  # AMP: for autocast in forward()
        self.resnet = torchvision.models.get_model(arch, num_classes=10)

    def forward(self, x):
        """Return the scores (N, 10) of images x, uint8 (N, 3, 32, 32)."""
        x = normalise(x.contiguous(memory_format=torch.channels_last), MEAN, STD)
        with torch.autocast(x.device.type, self.dtype, enabled=bool(self.dtype)):
            return self.resnet(x).float()  # AMP: 16 bits within, 32 for the loss


def train_step(model, batch, optimizer, device, scaler):  # AMP: the loss scaler
    """Train on a batch; return its [loss_sum, top1, top5, count]."""
    images, labels = (tensor.to(device, non_blocking=True) for tensor in batch)
    scores = model(crop_and_flip(images))
    loss = F.cross_entropy(scores, labels)
    # AMP: scales the loss so fp16 gradients do not underflow
    scaler.scale(loss).backward()
    scaler.step(optimizer)  # AMP: unscales; skips a step with inf or NaN
    scaler.update()  # AMP: halves the scale after a skipped step
    optimizer.zero_grad()
    return batch_sums(loss, *top1_top5(scores, labels))


@torch.no_grad()
def evaluate(model, loader, device):
    """Return {"loss": mean, "acc1": %, "acc5": %}."""
    model.eval()
    sums = torch.zeros(4, device=device)
    for images, labels in loader:
        images = images.to(device, non_blocking=True)
        labels = labels.to(device, non_blocking=True)
        scores = model(images)
        loss = F.cross_entropy(scores, labels)
        sums += batch_sums(loss, *top1_top5(scores, labels))
    return to_metrics(sums, "acc1", "acc5")


def main():
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--arch", choices=ARCHS, default="resnet18", help="ResNet")
    parser.add_argument("--epochs", type=positive, default=3, help="epochs")
    parser.add_argument("--batch-size", type=int, default=128, help="images per GPU")
    parser.add_argument("--lr", type=float, default=0.1, help="learning rate")
    parser.add_argument(
        "--log-interval", type=positive, default=50, help="steps per log line"
    )
    parser.add_argument("--resume", metavar="FILE", help="checkpoint to resume")
    parser.add_argument("--seed", type=int, default=0, help="random seed")
    parser.add_argument("--dtype", choices=DTYPES, help="precision")  # AMP: or fp32
    args = parser.parse_args()

    gpus = max(1, torch.accelerator.device_count())  # DP: one process for all GPUs
    device = get_device()
    torch.set_float32_matmul_precision("high")  # allow TF32, as convolutions do
    torch.manual_seed(args.seed)

    dtype = pick_dtype(device, args.dtype)  # AMP: the fastest, unless --dtype is set
    train_set, val_set, _ = cinic()
    model = Classifier(args.arch, dtype)  # AMP: bf16, fp16 or None
    model = model.to(device, memory_format=torch.channels_last)
    log = RunLog(args, device, model, gpus)  # DP: counts all GPUs
    writer = SummaryWriter(log.folder)  # TB: one folder per run
    dp_model = nn.DataParallel(model)  # DP: copied to all GPUs in every step

    batch_size = args.batch_size * gpus  # DP: split over all GPUs
    sampler = RandomSampler(train_set)
    loader = make_loader(train_set, batch_size, device, sampler=sampler)
    val_loader = make_loader(val_set, args.batch_size, device)
    optimizer = torch.optim.SGD(model.parameters(), args.lr, 0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs)
    state = TrainingState(args, model, optimizer, scheduler, device, log.folder)
    log.print(f"Autocast dtype: {dtype}")  # AMP: fp16 also needs a scaler, below
    state.scaler = torch.GradScaler(device.type, enabled=dtype == torch.float16)
    if args.resume is not None:
        state.resume(args.resume)
    num_steps = len(loader)
    start = time.perf_counter()
    for epoch in range(state.epoch + 1, args.epochs + 1):
        epoch_start = time.perf_counter()
        state.epoch = epoch
        model.train()
        total = torch.zeros(4, device=device)  # losses, top1, top5, images
        sums = torch.zeros(4, device=device)  # the same, since the last line
        data_time, step_end = 0.0, time.perf_counter()
        for step, batch in enumerate(log.progress(loader, "training"), 1):
            data_time += time.perf_counter() - step_end
            # DP: train with the wrapper, which splits the batch
            sums += train_step(dp_model, batch, optimizer, device, state.scaler)
            # Reading the sums waits for the GPU, so it happens once in many steps.
            if step % args.log_interval == 0 or step == num_steps:
                total += sums
                sums.zero_()
                metrics = to_metrics(total, "acc1", "acc5", check_finite=True)
                seconds = time.perf_counter() - epoch_start
                log.print(
                    f"Epoch: [{epoch}][{step}/{num_steps}]  "
                    f"Time {seconds / step:.3f}  Data {data_time / step:.3f}  "
                    f"Loss {metrics['loss']:.4f}  "
                    f"Acc@1 {metrics['acc1']:.2f}  Acc@5 {metrics['acc5']:.2f}"
                )
                metrics["lr"] = optimizer.param_groups[0]["lr"]  # TB: one more curve
                global_step = (epoch - 1) * num_steps + step  # TB: over all epochs
                for name, value in metrics.items():
                    writer.add_scalar(f"train/{name}", value, global_step)
            step_end = time.perf_counter()
        seconds = time.perf_counter() - epoch_start
        scheduler.step()
        val_metrics = evaluate(model, log.progress(val_loader, "validation"), device)
        acc1, acc5 = val_metrics["acc1"], val_metrics["acc5"]
        log.print(f" * Acc@1 {acc1:.2f}  Acc@5 {acc5:.2f}")
        state.save(acc1)
        log.epoch(epoch, len(train_set), seconds)
        for name, value in val_metrics.items():
            writer.add_scalar(f"validation/{name}", value, epoch * num_steps)
            writer.flush()  # TB: write at once, not within two minutes
    training_seconds = time.perf_counter() - start
    log.print(f"Total training time: {training_seconds:.1f} s")
    log.write_result(acc1, training_seconds)


if __name__ == "__main__":
    run(main)
