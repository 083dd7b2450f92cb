"""Measurements of dp_ddp_intro: on CPUs a small model."""

import sys

import timing
import torch
from torch.nn.parallel import DistributedDataParallel

from common.data import REPOSITORY
from common.device import get_device, get_ranks

sys.path.insert(0, str(REPOSITORY / "dp_ddp_intro"))
import ddp
import single as script

from dataset import random_sequences
from model import Transformer

BATCH, LENGTH = 16, 256  # as in the scripts
SMALL = {"layers": 2, "width": 128, "heads": 4}
OPTIONS = {} if torch.accelerator.device_count() else SMALL


def make(device):
    """Return the model, and its optimizer."""
    model = Transformer(length=LENGTH, **OPTIONS).to(device)
    return model, torch.optim.Adam(model.parameters(), 0.0003, fused=True)


def single(repeats):
    """Return the rows of the script for one GPU: sequences/s against its ceiling."""
    device = get_device()
    model, optimizer = make(device)

    def train(loader):
        script.train(model, loader, optimizer, device)

    data = random_sequences(2048, LENGTH)
    speeds = timing.measure(timing.make_cases(train, data, BATCH, device), repeats)
    name = "dp_ddp_intro/single.py"
    return timing.ceiling_rows(name, speeds["script"], speeds["ceiling"])


def scaling(repeats):
    """Return the rows of all processes against one; all ranks call this."""
    device = get_device(get_ranks()[1])
    (alone, alone_optimizer), (own, own_optimizer) = make(device), make(device)
    ddp_model = DistributedDataParallel(own)
    data = random_sequences(BATCH, LENGTH)
    batch = data.images.to(device), data.labels.to(device)

    def train_alone(loader):
        script.train(alone, loader, alone_optimizer, device)

    def train_together(loader):
        ddp.train(ddp_model, loader, own_optimizer, device)

    name = "dp_ddp_intro/ddp.py"
    return timing.scaling_rows(name, batch, train_alone, train_together, repeats)


if __name__ == "__main__":
    timing.main(single, scaling)
