"""What is measured of exercise 8. Its large-data scripts have the same loops."""

import json
import sys

import plain_photos as plain
import torch
from measure import against_one, as_it_comes, main, measure, row, steps_for
from torch.nn.parallel import DistributedDataParallel

from common.data import REPOSITORY, InMemory, data_dir, make_loader, normalise
from common.device import get_device, get_ranks
from common.prepare import find_images, read_photos

sys.path.insert(0, str(REPOSITORY / "exercise8"))
import pytorch_dvc_cnn_pretrained as script
import pytorch_dvc_cnn_pretrained_multigpu as multigpu

from dataset import CLASSES, MEAN, NAME, SIZE, STD, augment, dogs_vs_cats

BACKBONES = "vgg16", "tinyvgg"
BATCH = 25


def image_folder():
    return find_images(data_dir(NAME), "train", CLASSES[0]) / "train"


def input_only(repeats):
    """Yield the rows of the loader alone, on one core: files to batches."""
    folder, train_set = image_folder(), dogs_vs_cats()[0]
    some = torch.randperm(len(train_set))[:400].tolist()
    files = sorted(folder.glob("*/*.jpg"))

    def load(images, then=lambda images: images):
        labels = torch.zeros(len(images))
        part = InMemory(images, labels)
        for images, _ in make_loader(part, BATCH, torch.device("cpu"), shuffle=True):
            then(images)
        return len(labels)

    def prepare_and_load():
        return load(read_photos([files[i] for i in some], SIZE, threads=1)[0])

    def augmented(images):
        return augment(normalise(images, MEAN, STD))

    def plainly():
        for _ in plain.make_loader(folder, some, BATCH):
            pass
        return len(some)

    prepared = train_set.images[some]
    with as_it_comes(
        plain.__file__, folder, json.dumps(some)
    ) as plainly_as_it_comes:
        cases = {"prepare": prepare_and_load, "load": lambda: load(prepared)}
        cases |= {"plain": plainly, "as it comes": plainly_as_it_comes}
        cases["augmented"] = lambda: load(prepared, augmented)
        speeds = measure(cases, repeats)
    name, comes = "exercise 8, input only, one core", speeds["as it comes"]
    yield row(name, "plain", comes)
    yield row(name, "plain, with env.sh", speeds["plain"])
    yield row(
        name, "preparing (once) and loader / plain", speeds["prepare"], comes, 2.2
    )
    yield row(name, "loader / plain", speeds["load"], comes)
    yield row(name, "loader and augmentation / plain", speeds["augmented"], comes)


class Setup:
    """A model of the main phase, its optimizer, and how to train it on batches."""

    def __init__(self, backbone, device, memory_format=torch.channels_last):
        self.model = script.Classifier(backbone, "none")  # weights change no speed
        self.model = self.model.to(device, memory_format=memory_format)
        self.model.features.requires_grad_(False)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.01)
        self.device = device

    def train(self, loader):
        script.train(self.model, loader, self.optimizer, self.device)


def of_backbone(backbone, repeats):
    """Yield the rows of the script for one GPU: its ceiling, and the plain way."""
    device, train_set = get_device(), dogs_vs_cats()[0]
    folder = image_folder()
    own = Setup(backbone, device)
    other = Setup(backbone, device, torch.contiguous_format)
    images, labels = train_set.__getitems__(range(BATCH))
    batch = images.to(device), labels.to(device)
    steps = steps_for(lambda steps: own.train([batch] * steps))
    some = torch.randint(len(train_set), (steps * BATCH,)).tolist()
    few = some[: 8 * BATCH]
    loader = make_loader(train_set, BATCH, device, sampler=some)
    plain_loader = plain.make_loader(folder, few, BATCH)

    def ceiling():
        own.train([batch] * steps)
        return steps * BATCH

    def own_loop():
        own.train(loader)
        return steps * BATCH

    def plainly():
        args = other.model, plain_loader, script.criterion, other.optimizer, device
        plain.train(*args)
        return len(few)

    cases = {"ceiling": ceiling, "script": own_loop, "plain": plainly}
    speeds = measure(cases, repeats)
    name = f"pytorch_dvc_cnn_pretrained.py, {backbone}"
    yield row(name, "ceiling", speeds["ceiling"])
    yield row(name, "script / ceiling", speeds["script"], speeds["ceiling"], 0.95)
    yield row(name, "plain", speeds["plain"])
    yield row(name, "script / plain", speeds["script"], speeds["plain"])


def scaling_of(backbone, repeats):
    """Return the rows of all processes against one; all of them call it."""
    device = get_device(get_ranks()[1])
    alone, own = Setup(backbone, device), Setup(backbone, device)
    ddp_model = DistributedDataParallel(own.model)
    images = torch.randint(0, 256, (BATCH, 3, 150, 150), dtype=torch.uint8)
    images, labels = images.to(device), torch.zeros(BATCH, device=device)

    def batches(size, steps):
        return [(images[:size], labels[:size])] * steps

    def by_itself(*size_and_steps):
        alone.train(batches(*size_and_steps))

    def together(*size_and_steps):
        loader = batches(*size_and_steps)
        multigpu.train(ddp_model, loader, own.optimizer, device)

    name = f"pytorch_dvc_cnn_pretrained_multigpu.py, {backbone}"
    return against_one(name, BATCH, by_itself, together, repeats)


def single(repeats):
    yield from input_only(repeats)
    for backbone in BACKBONES:
        yield from of_backbone(backbone, repeats)


def scaling(repeats):
    for backbone in BACKBONES:
        yield from scaling_of(backbone, repeats)


if __name__ == "__main__":
    main(single, scaling)
