"""Variants of a training step, a row for each: where the data is, how cuDNN chooses.

    source common/env.sh
    cd bench
    python variants.py exercise8

Needs a GPU, and the data set in DATADIR. The first rows train on

- batches that are gathered in memory, copied to pinned memory and to the GPU,
- batches that are gathered into pinned memory, and copied to the GPU,
- a data set on the GPU, which only fits there if it is small,

in turns. The last two rows train on one batch, without and with cudnn.benchmark,
each in a new Python. `first_step` is the seconds until its first step has ended.
"""

import argparse
import json
import subprocess
import sys
import time
from importlib import import_module
from itertools import islice

import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler

import timing
from common.data import REPOSITORY, collate
from common.device import get_device
from common.errors import UserError, run
from tools.machine import REQUIRED_FILES

SEARCHES = {"cudnn.benchmark off": False, "cudnn.benchmark on": True}


class PinnedBatches:
    """Batches gathered into pinned memory. PyTorch's allocator reuses it."""

    def __init__(self, dataset, sampler):
        self.dataset, self.sampler = dataset, sampler

    def gather(self, tensor, indices):
        shape = len(indices), *tensor.shape[1:]
        batch = torch.empty(shape, dtype=tensor.dtype, pin_memory=True)
        return torch.index_select(tensor, 0, indices, out=batch)

    def __len__(self):
        return len(self.sampler)

    def __iter__(self):
        for indices in map(torch.tensor, self.sampler):
            tensors = self.dataset.images, self.dataset.labels
            yield tuple(self.gather(tensor, indices) for tensor in tensors)


class DeviceBatches(PinnedBatches):
    """Batches gathered on the GPU, from a data set that stays there."""

    def __init__(self, dataset, sampler, device):
        tensors = dataset.images.to(device), dataset.labels.to(device)
        super().__init__(type(dataset)(*tensors), sampler)

    def gather(self, tensor, indices):
        indices = indices.pin_memory().to(tensor.device, non_blocking=True)
        return tensor.index_select(0, indices)


def make_loaders(dataset, batch_size, device):
    """Return {name: loader of random batches}, all of the same data."""
    sampler = BatchSampler(RandomSampler(dataset), batch_size, drop_last=True)
    options = {"collate_fn": collate, "pin_memory": True, "batch_sampler": sampler}
    return {
        "gather, copy to pinned memory": DataLoader(dataset, **options),
        "gather into pinned memory": PinnedBatches(dataset, sampler),
        "data set on the GPU": DeviceBatches(dataset, sampler, device),
    }


class FirstSteps:
    """So many steps of a loader, from its start again if it has fewer."""

    def __init__(self, loader, dataset, steps):
        self.loader, self.dataset, self.steps = loader, dataset, steps

    def __len__(self):
        return self.steps

    def __iter__(self):
        left = self.steps
        while left > 0:
            yield from islice(self.loader, left)
            left -= len(self.loader)


def input_rows(exercise, device, repeats, seconds):
    """Yield a row for each loader; the ratios are to the first one."""
    exercises = import_module("exercises")
    dataset, size = exercises.load_data(exercise)
    script, _, option = exercises.SCRIPTS[exercise][-1]
    name, _, train = exercises.start(exercise, script, option, device)
    loaders = make_loaders(dataset, size, device)
    batch = [t.to(device) for t in dataset.__getitems__(range(size))]
    steps = timing.count_steps(lambda n: train(timing.Batches(batch, n)), seconds)

    def train_on(loader):
        train(FirstSteps(loader, dataset, steps))
        return steps * size

    cases = {what: lambda one=one: train_on(one) for what, one in loaders.items()}
    speeds = timing.measure(cases, repeats)
    baseline = next(iter(speeds.values()))
    for what, own in speeds.items():
        yield timing.make_row(name, what, own, baseline)


def search_row(exercise, what, device, repeats, seconds):
    """Return the row of one batch, with or without cuDNN's search."""
    exercises = import_module("exercises")
    torch.backends.cudnn.benchmark = SEARCHES[what]
    dataset, size = exercises.load_data(exercise)
    script, _, option = exercises.SCRIPTS[exercise][-1]
    name, _, train = exercises.start(exercise, script, option, device)
    batch = [t.to(device) for t in dataset.__getitems__(range(size))]
    start = time.perf_counter()
    train(timing.Batches(batch, 1))
    first_step = time.perf_counter() - start
    steps = timing.count_steps(lambda n: train(timing.Batches(batch, n)), seconds)

    def case():
        train(timing.Batches(batch, steps))
        return steps * size

    speeds = timing.measure({what: case}, repeats)[what]
    return timing.make_row(name, what, speeds) | {"first_step": first_step}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("exercise", choices=REQUIRED_FILES, help="lesson's folder")
    parser.add_argument("--repeats", type=int, default=5, help="repeats of a case")
    parser.add_argument("--seconds", type=float, default=1, help="per repeat")
    parser.add_argument("--search", choices=SEARCHES, help="this row alone")
    args = parser.parse_args()
    sys.path.insert(0, str(REPOSITORY / args.exercise))
    device = get_device()
    if device.type == "cpu":
        raise UserError("the variants need a GPU")
    torch.set_float32_matmul_precision("high")  # as in the scripts
    measure = args.repeats, args.seconds
    if args.search:
        row = search_row(args.exercise, args.search, device, *measure)
        print(json.dumps(row), flush=True)
        return
    for row in input_rows(args.exercise, device, *measure):
        print(json.dumps(row), flush=True)
    if args.exercise != "dp_ddp_intro":  # which has no convolution
        for what in SEARCHES:
            subprocess.run(
                [sys.executable, *sys.argv, f"--search={what}"], check=True
            )


if __name__ == "__main__":
    run(main)
