"""What is measured of cifar100_demo. ResNet-152 and 224 pixels are for GPUs."""

import sys
from argparse import Namespace

import plain_cifar
import torch
from measure import against_one, as_it_comes, main, measure, row, steps_for
from torch.nn.parallel import DistributedDataParallel

from common.data import REPOSITORY, make_loader
from common.device import find_gpus, get_device, get_ranks, pick_dtype
from common.log import RunLog

sys.path.insert(0, str(REPOSITORY / "cifar100_demo"))
import train_cifar100 as script
import train_ddp_cifar100 as ddp

from dataset import cifar100

GPUS = find_gpus()[1]
ARCH, SIZE, BATCH = ("resnet152", 224, 128) if GPUS else ("resnet18", 64, 32)
PLAIN_STEPS = 2


def wait(log, done, total, sums, start):
    """Wait for the device, as report_iterations() does, and report nothing."""
    sums.tolist()


script.report_iterations = ddp.report_iterations = wait
# Not each tenth of an epoch: ours have few steps, and each line is a wait.
script.is_due = ddp.is_due = lambda step, steps: step % 100 == 0 or step == steps


def make(device, dtype=None):
    """Return the model of the scripts, its optimizer, and the scaler."""
    model = script.Classifier(ARCH, SIZE, dtype)
    model = model.to(device, memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(
        model.parameters(), lr=0.01, momentum=0.9, fused=True
    )
    for p in model.parameters():  # or undefined if the scaler skips the first step
        optimizer.state[p]["momentum_buffer"] = torch.zeros_like(p)
    scaler = torch.GradScaler(device.type, enabled=dtype == torch.float16)
    return model, optimizer, scaler


def train(module, device, loader, model, *optimizer_and_scaler):
    args = Namespace(steps=len(loader), batch_size=BATCH)
    log = RunLog(args, device, enabled=False)
    module.train(args, model, device, loader, *optimizer_and_scaler, log, None)


def input_only(repeats):
    """Yield the rows of the loader alone, on one core."""
    train_set, _ = cifar100()
    cpu = torch.device("cpu")
    loader = make_loader(train_set, plain_cifar.BATCH, cpu, shuffle=True)
    resize = script.Classifier("resnet18", plain_cifar.SIZE, None)
    resize.resnet = torch.nn.Identity()
    plain_loader = plain_cifar.make_loader()

    def own():
        return sum(len(images) for images, _ in loader)

    def resized():
        for i, (images, _) in enumerate(loader, start=1):
            resize(images)
            if i == PLAIN_STEPS:
                return i * plain_cifar.BATCH

    cases = {"own": own, "resized": resized}
    cases["plain"] = lambda: plain_cifar.load(plain_loader, PLAIN_STEPS)
    program = plain_cifar.__file__
    with as_it_comes(program, PLAIN_STEPS) as cases["as it comes"]:
        speeds = measure(cases, repeats)
    name = "train_cifar100.py, input only, one core"
    yield row(name, "plain", speeds["as it comes"])
    yield row(name, "plain, with env.sh", speeds["plain"])
    yield row(name, "loader / plain", speeds["own"], speeds["as it comes"], 50)
    yield row(
        name, "loader / plain, with env.sh", speeds["own"], speeds["plain"], 50
    )
    what = "loader and resizing on the CPU / plain"
    yield row(name, what, speeds["resized"], speeds["as it comes"])


def single(repeats):
    """Yield the rows of the script for one GPU, without and with --amp."""
    yield from input_only(repeats)
    device, (train_set, _) = get_device(), cifar100()
    images, labels = train_set.__getitems__(range(BATCH))
    batch, cases = (images.to(device), labels.to(device)), {}
    options = {"": None}
    if dtype := pick_dtype(device):  # a CPU may have none of 16 bits
        options[f" --amp, {str(dtype)[6:]}"] = dtype
    for option, dtype in options.items():
        made = make(device, dtype)
        steps = steps_for(
            lambda n, made=made: train(script, device, [batch] * n, *made)
        )
        some = torch.randint(len(train_set), (steps * BATCH,)).tolist()
        loader = make_loader(train_set, BATCH, device, sampler=some)
        for case, batches in (("ceiling", [batch] * steps), ("script", loader)):

            def case_train(made=made, batches=batches):
                train(script, device, batches, *made)
                return len(batches) * BATCH

            cases[case + option] = case_train
    speeds = measure(cases, repeats)
    for option in options:
        name = f"train_cifar100.py{option}, {ARCH}, {SIZE} pixels"
        own, ceiling = speeds[f"script{option}"], speeds[f"ceiling{option}"]
        yield row(name, "ceiling", ceiling)
        yield row(name, "script / ceiling", own, ceiling, 0.95)


def scaling(repeats):
    """Return the rows of all processes against one; all of them call it."""
    device = get_device(get_ranks()[1])
    alone, (own, *others) = make(device), make(device)
    ddp_model = DistributedDataParallel(own)
    ddp_model.broadcast_buffers = False
    images = torch.randint(0, 256, (BATCH, 3, 32, 32), dtype=torch.uint8)
    images, labels = images.to(device), torch.zeros(BATCH, device=device).long()

    def batches(size, steps):
        return [(images[:size], labels[:size])] * steps

    def by_itself(*size_and_steps):
        train(script, device, batches(*size_and_steps), *alone)

    def together(*size_and_steps):
        train(ddp, device, batches(*size_and_steps), ddp_model, *others)

    name = f"train_ddp_cifar100.py, {ARCH}, {SIZE} pixels"
    return against_one(name, BATCH, by_itself, together, repeats)


if __name__ == "__main__":
    main(single, scaling)
