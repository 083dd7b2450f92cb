"""What is measured of dp_ddp_intro. The scripts' default model is for GPUs."""

import functools
import sys

import torch
from measure import against_one, main, measure, row, steps_for
from torch.nn.parallel import DistributedDataParallel

from common.data import REPOSITORY, make_loader
from common.device import find_gpus, get_device, get_ranks

sys.path.insert(0, str(REPOSITORY / "dp_ddp_intro"))
import ddp
import single as script

from dataset import random_sequences
from model import Transformer

sys.path.pop(0)  # or its folder tensorflow passes for TensorFlow

BATCH, LENGTH = 16, 256  # as in the scripts
SMALL = {"layers": 2, "width": 128, "heads": 4}
OPTIONS = {} if find_gpus()[1] else SMALL


def make(device):
    """Return the model, and its optimizer."""
    model = Transformer(length=LENGTH, **OPTIONS).to(device)
    return model, torch.optim.Adam(model.parameters(), 0.0003)


@functools.cache
def batch_on(device, size=BATCH):
    """Return a batch that stays on the device."""
    data = random_sequences(size, LENGTH)
    return data.images.to(device), data.labels.to(device)


def single(repeats):
    """Yield the rows of the script for one GPU: sequences/s against its ceiling."""
    device = get_device()
    model, optimizer = make(device)
    batch = batch_on(device)

    def train(loader):
        script.train(model, loader, optimizer, device)
        return len(loader) * BATCH

    steps = steps_for(lambda steps: train([batch] * steps))
    data = random_sequences(steps * BATCH, LENGTH)
    loader = make_loader(data, BATCH, device, shuffle=True)
    cases = {
        "ceiling": lambda: train([batch] * steps),
        "script": lambda: train(loader),
    }
    speeds = measure(cases, repeats)
    name = "dp_ddp_intro/single.py"
    yield row(name, "ceiling", speeds["ceiling"])
    yield row(name, "script / ceiling", speeds["script"], speeds["ceiling"], 0.95)


def scaling(repeats):
    """Return the rows of all processes against one; all of them call it."""
    device = get_device(get_ranks()[1])
    (alone, alone_optimizer), (own, own_optimizer) = make(device), make(device)
    ddp_model = DistributedDataParallel(own)

    def by_itself(size, steps):
        batches = [batch_on(device, size)] * steps
        script.train(alone, batches, alone_optimizer, device)

    def together(size, steps):
        batches = [batch_on(device, size)] * steps
        ddp.train(ddp_model, batches, own_optimizer, device)

    name = "dp_ddp_intro/ddp.py"
    return against_one(name, BATCH, by_itself, together, repeats)


if __name__ == "__main__":
    main(single, scaling)
