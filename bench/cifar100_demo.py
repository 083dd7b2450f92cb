"""Measurements of cifar100_demo: on CPUs ResNet-18 with 64 pixels."""

import sys
from argparse import Namespace
from functools import partial

import naive_cifar
import timing
import torch
from torch.nn.parallel import DistributedDataParallel

from common.data import REPOSITORY, make_loader
from common.device import get_device, get_ranks, pick_dtype
from common.log import RunLog

sys.path.insert(0, str(REPOSITORY / "cifar100_demo"))
import train_cifar100 as script
import train_ddp_cifar100 as ddp

from dataset import cifar100

GPUS = torch.accelerator.device_count()
ARCH, SIZE, BATCH = ("resnet152", 224, 128) if GPUS else ("resnet18", 64, 32)
NAIVE_STEPS = 2


def wait(log, done, total, sums, start):
    """Wait for the device, as report_iterations() does, but report nothing."""
    sums.tolist()


script.report_iterations = ddp.report_iterations = wait
# A tenth of an epoch is few steps here, and each report waits for the device.
script.is_due = ddp.is_due = lambda step, steps: step % 100 == 0 or step == steps


def make(device, dtype=None):
    """Return the scripts' model, its optimizer and the scaler."""
    model = script.Classifier(ARCH, SIZE, dtype)
    model = model.to(device, memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    scaler = torch.GradScaler(device.type, enabled=dtype == torch.float16)
    return model, optimizer, scaler


def train(module, device, model, optimizer, scaler, loader):
    args = Namespace(steps=len(loader), batch_size=BATCH)
    log = RunLog(args, device, enabled=False)
    module.train(model, loader, optimizer, device, args, scaler, log, None)


def input_rows(repeats):
    """Yield the rows of the loader alone, on one core."""
    train_set, _ = cifar100()
    cpu = torch.device("cpu")
    loader = make_loader(train_set, naive_cifar.BATCH, cpu, shuffle=True)
    resize = script.Classifier("resnet18", naive_cifar.SIZE, None)
    resize.resnet = torch.nn.Identity()
    naive_loader = naive_cifar.make_loader()

    def load():
        return sum(len(images) for images, _ in loader)

    def resized():
        for i, (images, _) in enumerate(loader, start=1):
            resize(images)
            if i == NAIVE_STEPS:
                return i * naive_cifar.BATCH

    def naive():
        return naive_cifar.load(naive_loader, NAIVE_STEPS)

    cases = {"load": load, "resized": resized, "naive": naive}
    with timing.start_naive(naive_cifar.__file__, NAIVE_STEPS) as cases["untuned"]:
        speeds = timing.measure(cases, repeats)
    name, untuned = "train_cifar100.py, input only, one core", speeds["untuned"]
    yield timing.make_row(name, "naive", untuned)
    yield timing.make_row(name, "naive, with env.sh", speeds["naive"])
    yield timing.make_row(name, "loader / naive", speeds["load"], untuned, 50)
    what = "loader / naive, with env.sh"
    yield timing.make_row(name, what, speeds["load"], speeds["naive"], 50)
    what = "loader and resizing on the CPU / naive"
    yield timing.make_row(name, what, speeds["resized"], untuned)


def single(repeats):
    """Yield the rows of the script for one GPU, without and with --amp."""
    yield from input_rows(repeats)
    device, (train_set, _) = get_device(), cifar100()
    dtypes, cases = {"": None}, {}
    if dtype := pick_dtype(device):  # a CPU may have no 16-bit format
        dtypes[f" --amp, {str(dtype)[6:]}"] = dtype
    for option, dtype in dtypes.items():
        own_train = partial(train, script, device, *make(device, dtype))
        own_cases = timing.make_cases(own_train, train_set, BATCH, device)
        for case, run in own_cases.items():
            cases[case + option] = run
    speeds = timing.measure(cases, repeats)
    for option in dtypes:
        name = f"train_cifar100.py{option}, {ARCH}, {SIZE} pixels"
        own, ceiling = speeds[f"script{option}"], speeds[f"ceiling{option}"]
        yield from timing.ceiling_rows(name, own, ceiling)


def scaling(repeats):
    """Return the rows of all processes against one; all ranks call this."""
    device = get_device(get_ranks()[1])
    alone, (own, *others) = make(device), make(device)
    ddp_model = DistributedDataParallel(own)
    ddp_model.broadcast_buffers = False
    images = torch.randint(0, 256, (BATCH, 3, 32, 32), dtype=torch.uint8)
    batch = images.to(device), torch.zeros(BATCH, device=device).long()
    train_alone = partial(train, script, device, *alone)
    train_together = partial(train, ddp, device, ddp_model, *others)
    name = f"train_ddp_cifar100.py, {ARCH}, {SIZE} pixels"
    return timing.scaling_rows(name, batch, train_alone, train_together, repeats)


if __name__ == "__main__":
    timing.main(single, scaling)
