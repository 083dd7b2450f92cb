"""What is measured of cinic_lab."""

import sys
from argparse import Namespace

import plain_cinic
import torch
from measure import against_one, as_it_comes, main, measure, row, steps_for
from torch.nn.parallel import DistributedDataParallel

from common.data import REPOSITORY, data_dir, make_loader, normalise
from common.device import get_device, get_ranks, pick_dtype
from common.log import Nothing, RunLog
from common.prepare import find_images

sys.path.insert(0, str(REPOSITORY / "cinic_lab"))
import cinic as script
import cinic_ddp as ddp
import cinic_tensorboard as one_gpu

from dataset import CLASSES, MEAN, NAME, STD, cinic, crop_and_flip
from state import State

BATCH = plain_cinic.BATCH
ARGS = Namespace(log_interval=10**9, batch_size=BATCH)


class Setup:
    """A resnet18 of a script, and what trains it."""

    def __init__(self, module, device, dtype=None):
        model = module.Classifier("resnet18")
        self.model = model.to(device, memory_format=torch.channels_last)
        self.model.amp = device.type, dtype, bool(dtype)
        optimizer = torch.optim.SGD(self.model.parameters(), 0.01, 0.9, fused=True)
        for p in (
            self.model.parameters()
        ):  # or undefined if the scaler skips the first step
            optimizer.state[p]["momentum_buffer"] = torch.zeros_like(p)
        scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
        self.state = State(self.model, optimizer, scheduler, device)
        fp16 = dtype == torch.float16
        self.state.scaler = torch.GradScaler(device.type, enabled=fp16)
        self.module, self.device = module, device

    def train(self, loader, model=None, writer=()):
        args = ARGS, model or self.model, self.state, loader, self.device
        self.module.train(*args, RunLog(ARGS, self.device, enabled=False), *writer)


def single(repeats):
    """Yield the rows of the loader, and of the script for one GPU."""
    device, (train_set, *_) = get_device(), cinic()
    loader = make_loader(train_set, BATCH, torch.device("cpu"), shuffle=True)
    epochs = max(1, 20000 // len(train_set))
    few = min(2048, len(train_set)) // BATCH * BATCH
    folder = find_images(data_dir(NAME), "train", CLASSES[0]) / "train"
    plain_loader = plain_cinic.make_loader(folder)

    def load(then=lambda images: images):
        for _ in range(epochs):
            for images, _ in loader:
                then(images)
        return epochs * len(train_set)

    def augmented(images):
        return normalise(crop_and_flip(images), MEAN, STD)

    with as_it_comes(plain_cinic.__file__, folder, few) as plainly_as_it_comes:
        cases = {"load": load, "augmented": lambda: load(augmented)}
        cases["plain"] = lambda: plain_cinic.load(plain_loader, few)
        cases["as it comes"] = plainly_as_it_comes
        speeds = measure(cases, repeats)
    name = "cinic_lab, input only, one core"
    plain = speeds["as it comes"]
    yield row(name, "plain", plain)
    yield row(name, "plain, with env.sh", speeds["plain"])
    yield row(name, "loader / plain", speeds["load"], plain, 20)
    what = "loader and augmentation / plain"
    yield row(name, what, speeds["augmented"], plain, 20)

    own = Setup(script, device)
    images, labels = train_set.__getitems__(range(BATCH))
    batch = images.to(device), labels.to(device)
    steps = steps_for(lambda steps: own.train([batch] * steps))
    some = torch.randint(len(train_set), (steps * BATCH,)).tolist()
    some_loader = make_loader(train_set, BATCH, device, sampler=some)

    def own_train(loader):
        own.train(loader)
        return steps * BATCH

    cases = {
        "ceiling": lambda: own_train([batch] * steps),
        "script": lambda: own_train(some_loader),
    }
    speeds = measure(cases, repeats)
    name = "cinic.py, resnet18"
    yield row(name, "ceiling", speeds["ceiling"])
    yield row(name, "script / ceiling", speeds["script"], speeds["ceiling"], 0.95)


def scaling(repeats):
    """Return the rows of all processes against one; all of them call it."""
    device = get_device(get_ranks()[1])
    dtype = pick_dtype(device)
    alone, own = Setup(one_gpu, device, dtype), Setup(ddp, device, dtype)
    ddp_model = DistributedDataParallel(own.model)
    ddp_model.broadcast_buffers = False
    images = torch.randint(0, 256, (BATCH, 3, 32, 32), dtype=torch.uint8)
    images, labels = images.to(device), torch.zeros(BATCH, device=device).long()
    writer = (Nothing(),)

    def batches(size, steps):
        return [(images[:size], labels[:size])] * steps

    def by_itself(*size_and_steps):
        alone.train(batches(*size_and_steps), writer=writer)

    def together(*size_and_steps):
        own.train(batches(*size_and_steps), ddp_model, writer)

    name = f"cinic_ddp.py, resnet18, {str(dtype or torch.float32)[6:]}"
    return against_one(name, BATCH, by_itself, together, repeats)


if __name__ == "__main__":
    main(single, scaling)
