"""What is measured of mnist_multigpu."""

import sys
from argparse import Namespace

import plain_mnist
import torch
from measure import against_one, as_it_comes, main, measure, row, steps_for
from torch.nn.parallel import DistributedDataParallel

from common.data import REPOSITORY, data_root, make_loader
from common.device import get_device, get_ranks
from common.log import RunLog

sys.path.insert(0, str(REPOSITORY / "mnist_multigpu"))
import mnist_ddp as ddp
import mnist_singlegpu as script

from dataset import mnist

BATCH = plain_mnist.BATCH
ARGS = Namespace(log_interval=10**9, batch_size=BATCH)


def make(device, memory_format=torch.channels_last):
    """Return the model of the scripts, and its optimizer."""
    model = script.make_model().to(device, memory_format=memory_format)
    return model, torch.optim.Adadelta(model.parameters(), 1.0)


class Batches(list):
    """Batches that stay on the device."""

    dataset = range(BATCH)


def train(module, model, loader, optimizer, device):
    log = RunLog(ARGS, device, enabled=False)
    module.train(ARGS, model, device, loader, optimizer, 1, log)


def single(repeats):
    """Yield the rows of the script for one GPU: its ceiling, and the plain way."""
    device, (train_set, _) = get_device(), mnist()
    (own, own_optimizer), (other, other_optimizer) = (
        make(device, memory_format)
        for memory_format in (torch.channels_last, torch.contiguous_format)
    )
    images, labels = train_set.__getitems__(range(BATCH))
    batch = images.to(device), labels.to(device)
    plain_loader = plain_mnist.make_loader(data_root())

    def own_train(loader):
        train(script, own, loader, own_optimizer, device)
        return len(loader) * BATCH

    def load():
        return sum(len(images) for images, _ in loader)

    def plainly(steps):
        return plain_mnist.train(other, plain_loader, other_optimizer, device, steps)

    steps = steps_for(lambda steps: own_train(Batches([batch] * steps)))
    few = steps_for(plainly, most=len(plain_loader))
    some = torch.randint(len(train_set), (steps * BATCH,)).tolist()
    loader = make_loader(train_set, BATCH, device, sampler=some)
    cases = {
        "ceiling": lambda: own_train(Batches([batch] * steps)),
        "script": lambda: own_train(loader),
    }
    with as_it_comes(plain_mnist.__file__, few) as plainly_as_it_comes:
        cases |= {"plain": lambda: plainly(few), "as it comes": plainly_as_it_comes}
        cases["load"] = load
        speeds = measure(cases, repeats)
    name = "mnist_singlegpu.py"
    yield row(name, "input only, one core", speeds["load"])
    yield row(name, "ceiling", speeds["ceiling"])
    yield row(name, "script / ceiling", speeds["script"], speeds["ceiling"], 0.95)
    yield row(name, "plain", speeds["as it comes"])
    yield row(name, "script / plain", speeds["script"], speeds["as it comes"])
    what = "script / plain, with env.sh"
    yield row(name, what, speeds["script"], speeds["plain"], 1.4)


def scaling(repeats):
    """Return the rows of all processes against one; all of them call it."""
    device = get_device(get_ranks()[1])
    (alone, alone_optimizer), (own, own_optimizer) = make(device), make(device)
    ddp_model = DistributedDataParallel(own)
    images = torch.randint(0, 256, (BATCH, 1, 28, 28), dtype=torch.uint8)
    images, labels = images.to(device), torch.zeros(BATCH, device=device).long()

    def batches(size, steps):
        return Batches([(images[:size], labels[:size])] * steps)

    def by_itself(*size_and_steps):
        train(script, alone, batches(*size_and_steps), alone_optimizer, device)

    def together(*size_and_steps):
        train(ddp, ddp_model, batches(*size_and_steps), own_optimizer, device)

    name = "mnist_ddp.py"
    return against_one(name, BATCH, by_itself, together, repeats)


if __name__ == "__main__":
    main(single, scaling)
