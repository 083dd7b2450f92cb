"""What is measured of dp_ddp_intro, with a small model."""

import functools
import sys

import torch
from measure import against_one, main, measure, row
from torch.nn.parallel import DistributedDataParallel

from common.data import REPOSITORY, make_loader
from common.device import get_device, get_ranks

sys.path.insert(0, str(REPOSITORY / "dp_ddp_intro"))
import ddp
import single as script

from dataset import random_sequences
from model import Transformer

sys.path.pop(0)  # or its folder tensorflow passes for TensorFlow

BATCH, STEPS, LENGTH = 16, 3, 256  # as in the scripts, but for the steps


def make(device):
    """Return a small model, and its optimizer."""
    model = Transformer(layers=2, width=128, heads=4, length=LENGTH).to(device)
    return model, torch.optim.Adam(model.parameters(), 0.003)


@functools.cache
def batches_on(device, size=BATCH):
    """Return the same batch many times; it stays on the device."""
    data = random_sequences(size, LENGTH)
    return [(data.images.to(device), data.labels.to(device))] * STEPS


def single(repeats):
    """Yield the rows of the script for one GPU: sequences/s against its ceiling."""
    device = get_device()
    model, optimizer = make(device)
    batches = batches_on(device)
    data = random_sequences(STEPS * BATCH, LENGTH)
    loader = make_loader(data, BATCH, device, shuffle=True)

    def train(loader):
        script.train(model, loader, optimizer, device)
        return STEPS * BATCH

    cases = {"ceiling": lambda: train(batches), "script": lambda: train(loader)}
    speeds = measure(cases, repeats)
    name = "dp_ddp_intro/single.py"
    yield row(name, "ceiling", speeds["ceiling"])
    yield row(name, "script / ceiling", speeds["script"], speeds["ceiling"], 0.95)


def scaling(repeats):
    """Return the rows of all processes against one; all of them call it."""
    device = get_device(get_ranks()[1])
    (alone, alone_optimizer), (own, own_optimizer) = make(device), make(device)
    ddp_model = DistributedDataParallel(own)

    def by_itself(size):
        script.train(alone, batches_on(device, size), alone_optimizer, device)

    def together(size):
        ddp.train(ddp_model, batches_on(device, size), own_optimizer, device)

    name = "dp_ddp_intro/ddp.py"
    return against_one(name, BATCH, STEPS, by_itself, together, repeats)


if __name__ == "__main__":
    main(single, scaling)
