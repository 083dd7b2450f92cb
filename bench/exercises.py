"""The exercises that bench.py measures: their data, models and scripts.

    python exercises.py EXERCISE REPEATS SECONDS

Prints the rows of one exercise as JSON, each as soon as it is measured: those of one
process, and under torchrun those of DDP. Modules of several exercises have the same
name, so every exercise runs in a separate process.
"""

import json
import os
import sys
from argparse import Namespace
from functools import partial
from importlib import import_module

import torch
import torch.distributed as dist
from torch import optim
from torch.nn.parallel import DistributedDataParallel

import timing
from common.data import REPOSITORY
from common.device import get_device, get_ranks, pick_dtype
from common.log import RunLog

GPUS = torch.accelerator.device_count()
ARGS = Namespace(log_interval=10**9, steps=10**9, batch_size=1)
LOG = RunLog(ARGS, torch.device("cpu"), enabled=False)


def load_data(exercise):
    """Return the training set, and the batch per process."""
    dataset = import_module("dataset")
    if exercise == "exercise8":
        return dataset.dogs_vs_cats()[0], 25
    if exercise == "mnist_multigpu":
        return dataset.mnist()[0], 128
    if exercise == "cifar100_demo":
        return dataset.cifar100()[0], 128 if GPUS else 32
    if exercise == "cinic_lab":
        return dataset.cinic()[0], 128
    return dataset.random_sequences(2048, 256), 16


# Each returns words for the row, model, optimizer, and train()'s other arguments.


def build_exercise8(script, backbone, device):
    model = script.Classifier(backbone, "none")  # weights do not change the speed
    model.features.requires_grad_(False)
    model = model.to(device, memory_format=torch.channels_last)
    return backbone, model, optim.SGD(model.parameters(), 0.01), ()


def build_mnist(script, _, device):
    model = script.Net().to(device, memory_format=torch.channels_last)
    return "", model, optim.Adadelta(model.parameters(), 1.0), ()


def build_cifar(script, _, device):
    arch, size = ("resnet152", 224) if GPUS else ("resnet18", 64)
    model = script.Classifier(arch, size, None)
    model = model.to(device, memory_format=torch.channels_last)
    more = torch.GradScaler(device.type, enabled=False), None, LOG, None
    words = f"{arch}, {size} pixels"
    return words, model, optim.SGD(model.parameters(), 0.01, 0.9), more


def build_cinic(script, _, device):
    dtype = pick_dtype(device)
    model = script.Classifier("resnet18", dtype)
    model = model.to(device, memory_format=torch.channels_last)
    optimizer = optim.SGD(model.parameters(), 0.01, 0.9)
    scaler = torch.GradScaler(device.type, enabled=dtype == torch.float16)
    words = f"resnet18, {str(dtype or torch.float32)[6:]}"
    return words, model, optimizer, (scaler,)


def build_intro(script, _, device):
    small = {} if GPUS else {"layers": 2, "width": 128, "heads": 4}
    model = script.Transformer(length=256, **small).to(device)
    optimizer = optim.Adam(model.parameters(), 0.0003, fused=True)
    return "dp_ddp_intro", model, optimizer, ()


# The functions above, and the naive versions.
BUILD = {
    "exercise8": (build_exercise8, "naive_photos"),
    "mnist_multigpu": (build_mnist, "naive_mnist"),
    "cifar100_demo": (build_cifar, "naive_cifar"),
    "cinic_lab": (build_cinic, "naive_cinic"),
    "dp_ddp_intro": (build_intro, None),
}
VGG = "pytorch_dvc_cnn_pretrained"
# Scripts for one GPU, their DDP counterparts, and the backbone.
SCRIPTS = {
    "exercise8": [(VGG, f"{VGG}_multigpu", name) for name in ("vgg16", "tinyvgg")],
    "mnist_multigpu": [("mnist_singlegpu", "mnist_ddp", None)],
    "cifar100_demo": [("train_cifar100", "train_ddp_cifar100", None)],
    "cinic_lab": [("cinic_tensorboard", "cinic_ddp", None)],
    "dp_ddp_intro": [("single", "ddp", None)],
}


def start(exercise, name, option, device, ddp=False):
    """Return the row's name, a model, and a function that trains it on a loader."""
    script = import_module(name)
    words, model, optimizer, more = BUILD[exercise][0](script, option, device)
    if ddp:
        model = DistributedDataParallel(model)
        model.broadcast_buffers = False  # as in the scripts

    def train(loader):
        if exercise == "mnist_multigpu":
            script.train(ARGS, model, device, loader, optimizer, 1, LOG)
        elif exercise == "cinic_lab":  # its loop is in main()
            model.train()
            step = partial(script.train_step, model)
            sum(step(batch, optimizer, device, *more) for batch in loader)
        else:
            script.train(model, loader, optimizer, device, *more)
        if GPUS:
            torch.accelerator.synchronize()

    return ", ".join(filter(None, [f"{name}.py", words])), model, train


def single_rows(exercise, device, repeats, seconds):
    """Yield the rows of one process: the input alone, and scripts for one GPU."""
    train_set, batch = load_data(exercise)
    naive = import_module(BUILD[exercise][1]) if BUILD[exercise][1] else None
    if hasattr(naive, "make_loaders"):
        loaders, name = naive.make_loaders(), f"{exercise}, input only, one core"
        cases = {k: timing.make_input_case(v, seconds) for k, v in loaders.items()}
        speeds = timing.measure(cases, repeats)
        yield from timing.compare(name, speeds, *loaders, naive.GOAL)
    for script, _, option in SCRIPTS[exercise]:
        name, _, train = start(exercise, script, option, device)
        cases = timing.make_cases(train, train_set, batch, device, seconds)
        if hasattr(naive, "make_training"):
            naive_train = naive.make_training(device)
            steps = timing.count_steps(naive_train, seconds)
            cases["naive"] = partial(naive_train, steps)
        speeds = timing.measure(cases, repeats)
        yield from timing.compare(name, speeds, "script", "ceiling", 0.95)
        if "naive" in cases:
            # On a CPU core the input takes less than a tenth of a naive step.
            goal = 1.4 if GPUS else 0.95
            yield from timing.compare(name, speeds, "script", "naive", goal)


def scaling_rows(exercise, device, repeats, seconds):
    """Yield the rows of all processes against one; all ranks call this."""
    train_set, size = load_data(exercise)
    batch = [tensor.to(device) for tensor in train_set.__getitems__(range(size))]
    for script, ddp, option in SCRIPTS[exercise]:
        _, _, alone = start(exercise, script, option, device)
        name, model, together = start(exercise, ddp, option, device, ddp=True)
        averaged = sum(p.nbytes for p in model.parameters() if p.requires_grad)
        trains = alone, together, averaged
        yield from timing.scaling_rows(name, batch, *trains, repeats, seconds)


def main():
    exercise, repeats, seconds = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
    sys.path.insert(0, str(REPOSITORY / exercise))
    torch.set_float32_matmul_precision("high")  # as in the scripts
    if "RANK" not in os.environ:
        for row in single_rows(exercise, get_device(), repeats, seconds):
            print(json.dumps(row), flush=True)
        return
    device = get_device(get_ranks()[1])
    dist.init_process_group()
    for row in scaling_rows(exercise, device, repeats, seconds):
        if dist.get_rank() == 0:
            print(json.dumps(row), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
