"""What is measured of dp_ddp_intro, with a small model."""

import sys

import torch
import torch.distributed as dist
from measure import measure, row
from torch.nn.parallel import DistributedDataParallel

from common.data import REPOSITORY, make_loader
from common.device import get_device, get_ranks

sys.path.insert(0, str(REPOSITORY / "dp_ddp_intro"))
import ddp
import single as script
from dataset import random_sequences
from model import Transformer

BATCH, STEPS, LENGTH = 16, 5, 256  # as in the scripts, but for the steps


def make(device):
    """Return a small model, and its optimizer."""
    model = Transformer(layers=2, width=128, heads=4, length=LENGTH).to(device)
    return model, torch.optim.Adam(model.parameters(), 0.003)


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
    """Yield the rows of all processes against one; all of them call it."""
    rank, local_rank, world_size = get_ranks()
    device = get_device(local_rank)
    (alone, alone_optimizer), (own, own_optimizer) = make(device), make(device)
    ddp_model = DistributedDataParallel(own)
    share = BATCH // world_size
    batches = {size: batches_on(device, size) for size in (BATCH, share)}

    def apart(size, ranks):
        if rank < ranks:
            script.train(alone, batches[size], alone_optimizer, device)
        dist.barrier()
        return STEPS * size * ranks

    def together(size):
        ddp.train(ddp_model, batches[size], own_optimizer, device)
        return STEPS * size * world_size

    cases = {
        "one": lambda: apart(BATCH, 1),
        "apart": lambda: apart(BATCH, world_size),
        "weak": lambda: together(BATCH),
        "strong": lambda: together(share),
    }
    speeds = measure(cases, repeats)
    name, one = "dp_ddp_intro/ddp.py", f"1 x {BATCH}"
    many = f"{world_size} x {BATCH}"
    # What this machine has to give: as many processes that do not talk.
    yield row(name, f"{many} without DDP / {one}", speeds["apart"], speeds["one"])
    goal = 0.95 * world_size
    yield row(name, f"weak, {many} / {one}", speeds["weak"], speeds["one"], goal)
    yield row(name, f"weak / {many} without DDP", speeds["weak"], speeds["apart"])
    what = f"strong, {world_size} x {share} / {one}"
    yield row(name, what, speeds["strong"], speeds["one"])
