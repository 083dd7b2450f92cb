"""Measurements of mnist_multigpu."""

import sys
from argparse import Namespace

import naive_mnist
import timing
import torch
from torch.nn.parallel import DistributedDataParallel

from common.data import REPOSITORY, make_loader
from common.device import get_device, get_ranks
from common.log import RunLog

sys.path.insert(0, str(REPOSITORY / "mnist_multigpu"))
import mnist_ddp as ddp
import mnist_singlegpu as script

from dataset import mnist

BATCH = naive_mnist.BATCH
ARGS = Namespace(log_interval=10**9, batch_size=BATCH)


def make(device, memory_format=torch.channels_last):
    """Return the scripts' model and its optimizer."""
    model = script.Net().to(device, memory_format=memory_format)
    return model, torch.optim.Adadelta(model.parameters(), 1.0)


def train(module, model, loader, optimizer, device):
    log = RunLog(ARGS, device, enabled=False)
    module.train(ARGS, model, device, loader, optimizer, 1, log)


def single(repeats):
    """Yield the rows of the script for one GPU, and of the naive version."""
    device, (train_set, _) = get_device(), mnist()
    own, own_optimizer = make(device)
    other, other_optimizer = make(device, torch.contiguous_format)
    naive_loader = naive_mnist.make_loader()
    loader = make_loader(train_set, BATCH, device, shuffle=True)

    def own_train(loader):
        train(script, own, loader, own_optimizer, device)

    def load():
        return sum(len(images) for images, _ in loader)

    def naive(steps):
        return naive_mnist.train(other, naive_loader, other_optimizer, device, steps)

    few = timing.count_steps(naive, most=len(naive_loader))
    cases = timing.make_cases(own_train, train_set, BATCH, device)
    with timing.start_naive(naive_mnist.__file__, few) as untuned:
        cases |= {"naive": lambda: naive(few), "untuned": untuned, "load": load}
        speeds = timing.measure(cases, repeats)
    name, own_speeds = "mnist_singlegpu.py", speeds["script"]
    yield timing.make_row(name, "input only, one core", speeds["load"])
    yield from timing.ceiling_rows(name, own_speeds, speeds["ceiling"])
    yield timing.make_row(name, "naive", speeds["untuned"])
    yield timing.make_row(name, "script / naive", own_speeds, speeds["untuned"])
    what = "script / naive, with env.sh"
    yield timing.make_row(name, what, own_speeds, speeds["naive"], 1.4)


def scaling(repeats):
    """Return the rows of all processes against one; all ranks call this."""
    device = get_device(get_ranks()[1])
    (alone, alone_optimizer), (own, own_optimizer) = make(device), make(device)
    ddp_model = DistributedDataParallel(own)
    images = torch.randint(0, 256, (BATCH, 1, 28, 28), dtype=torch.uint8)
    batch = images.to(device), torch.zeros(BATCH, device=device).long()

    def train_alone(loader):
        train(script, alone, loader, alone_optimizer, device)

    def train_together(loader):
        train(ddp, ddp_model, loader, own_optimizer, device)

    name = "mnist_ddp.py"
    return timing.scaling_rows(name, batch, train_alone, train_together, repeats)


if __name__ == "__main__":
    timing.main(single, scaling)
