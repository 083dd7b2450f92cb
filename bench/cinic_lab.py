"""Measurements of cinic_lab."""

import sys
from argparse import Namespace

import naive_cinic
import timing
import torch
from torch.nn.parallel import DistributedDataParallel

from common.data import REPOSITORY, data_dir, make_loader, normalise
from common.device import get_device, get_ranks, pick_dtype
from common.log import NullWriter, RunLog

sys.path.insert(0, str(REPOSITORY / "cinic_lab"))
import cinic as script
import cinic_ddp as ddp
import cinic_tensorboard as one_gpu

from dataset import MEAN, NAME, RAW, STD, cinic, crop_and_flip
from state import TrainingState

BATCH = naive_cinic.BATCH
ARGS = Namespace(log_interval=10**9, batch_size=BATCH)


class Setup:
    """A script's ResNet-18, and its training state."""

    def __init__(self, module, device, dtype=None):
        autocast = {"dtype": dtype} if dtype else {}  # cinic.py has none
        model = module.Classifier("resnet18", **autocast)
        self.model = model.to(device, memory_format=torch.channels_last)
        optimizer = torch.optim.SGD(self.model.parameters(), 0.01, 0.9)
        scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
        self.state = TrainingState(ARGS, self.model, optimizer, scheduler, device)
        self.state.epoch = 1
        fp16 = dtype == torch.float16
        self.state.scaler = torch.GradScaler(device.type, enabled=fp16)
        self.module, self.device = module, device

    def train(self, loader, model=None, writer=()):
        log = RunLog(ARGS, self.device, enabled=False)
        own = model or self.model, loader, self.state.optimizer, self.device
        self.module.train(*own, ARGS, self.state, log, *writer)


def input_rows(train_set, repeats):
    """Yield the rows of the loader alone, on one core."""
    loader = make_loader(train_set, BATCH, torch.device("cpu"), shuffle=True)
    epochs = max(1, 20000 // len(train_set))
    few = min(2048, len(train_set)) // BATCH * BATCH
    folder = data_dir(NAME) / RAW / "train"
    naive_loader = naive_cinic.make_loader(folder)

    def load(then=lambda images: images):
        for _ in range(epochs):
            for images, _ in loader:
                then(images)
        return epochs * len(train_set)

    def augmented(images):
        return normalise(crop_and_flip(images), MEAN, STD)

    with timing.start_naive(naive_cinic.__file__, folder, few) as untuned:
        cases = {
            "load": load,
            "augmented": lambda: load(augmented),
            "naive": lambda: naive_cinic.load(naive_loader, few),
            "untuned": untuned,
        }
        speeds = timing.measure(cases, repeats)
    name, untuned = "cinic_lab, input only, one core", speeds["untuned"]
    yield timing.make_row(name, "naive", untuned)
    yield timing.make_row(name, "naive, with env.sh", speeds["naive"])
    yield timing.make_row(name, "loader / naive", speeds["load"], untuned, 20)
    what = "loader and augmentation / naive"
    yield timing.make_row(name, what, speeds["augmented"], untuned, 20)


def single(repeats):
    """Yield the rows of the loader, and of the script for one GPU."""
    device, (train_set, *_) = get_device(), cinic()
    yield from input_rows(train_set, repeats)
    own = Setup(script, device)
    cases = timing.make_cases(own.train, train_set, BATCH, device)
    speeds = timing.measure(cases, repeats)
    name = "cinic.py, resnet18"
    yield from timing.ceiling_rows(name, speeds["script"], speeds["ceiling"])


def scaling(repeats):
    """Return the rows of all processes against one; all ranks call this."""
    device = get_device(get_ranks()[1])
    dtype = pick_dtype(device)
    alone, own = Setup(one_gpu, device, dtype), Setup(ddp, device, dtype)
    ddp_model = DistributedDataParallel(own.model)
    ddp_model.broadcast_buffers = False
    images = torch.randint(0, 256, (BATCH, 3, 32, 32), dtype=torch.uint8)
    batch = images.to(device), torch.zeros(BATCH, device=device).long()
    writer = (NullWriter(),)

    def train_alone(loader):
        alone.train(loader, writer=writer)

    def train_together(loader):
        own.train(loader, ddp_model, writer)

    name = f"cinic_ddp.py, resnet18, {str(dtype or torch.float32)[6:]}"
    return timing.scaling_rows(name, batch, train_alone, train_together, repeats)


if __name__ == "__main__":
    timing.main(single, scaling)
