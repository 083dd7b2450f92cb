"""Measurements of exercise 8; the large-data scripts have the same loops."""

import json
import sys

import naive_photos
import timing
import torch
from torch.nn.parallel import DistributedDataParallel

from common.data import REPOSITORY, InMemoryDataset, data_dir, make_loader, normalise
from common.device import get_device, get_ranks
from common.prepare import read_photo

sys.path.insert(0, str(REPOSITORY / "exercise8"))
import pytorch_dvc_cnn_pretrained as script
import pytorch_dvc_cnn_pretrained_multigpu as multigpu

from dataset import MEAN, NAME, RAW, SIZE, STD, augment, dogs_vs_cats

BACKBONES = "vgg16", "tinyvgg"
BATCH = 25


def image_folder():
    return data_dir(NAME) / RAW / "train"


def pick_images(train_set, count):
    """Return the indices of `count` random images."""
    return torch.randperm(len(train_set))[:count].tolist()


def input_rows(repeats):
    """Yield the rows of the loader alone, on one core, from files to batches."""
    folder, train_set = image_folder(), dogs_vs_cats()[0]
    some = pick_images(train_set, 400)
    files = sorted(folder.glob("*/*.jpg"))
    prepared = train_set.images[some]

    def load(images, then=lambda images: images):
        labels = torch.zeros(len(images))
        part = InMemoryDataset(images, labels)
        for images, _ in make_loader(part, BATCH, torch.device("cpu"), shuffle=True):
            then(images)
        return len(labels)

    def prepare_and_load():
        return load(torch.stack([read_photo(files[i], SIZE) for i in some]))

    def augmented(images):
        return augment(normalise(images, MEAN, STD))

    def naive():
        for _ in naive_photos.make_loader(folder, some, BATCH):
            pass
        return len(some)

    program, indices = naive_photos.__file__, json.dumps(some)
    with timing.start_naive(program, folder, indices) as untuned:
        cases = {
            "prepare": prepare_and_load,
            "load": lambda: load(prepared),
            "naive": naive,
            "untuned": untuned,
            "augmented": lambda: load(prepared, augmented),
        }
        speeds = timing.measure(cases, repeats)
    name, untuned = "exercise 8, input only, one core", speeds["untuned"]
    yield timing.make_row(name, "naive", untuned)
    yield timing.make_row(name, "naive, with env.sh", speeds["naive"])
    what = "preparing (once) and loader / naive"
    yield timing.make_row(name, what, speeds["prepare"], untuned, 2.2)
    yield timing.make_row(name, "loader / naive", speeds["load"], untuned)
    what = "loader and augmentation / naive"
    yield timing.make_row(name, what, speeds["augmented"], untuned)


class Setup:
    """A model with frozen features, its optimizer, and a function to train it."""

    def __init__(self, backbone, device, memory_format=torch.channels_last):
        self.model = script.Classifier(
            backbone, "none"
        )  # weights do not change the speed
        self.model = self.model.to(device, memory_format=memory_format)
        self.model.features.requires_grad_(False)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.01)
        self.device = device

    def train(self, loader):
        script.train(self.model, loader, self.optimizer, self.device)


def backbone_rows(backbone, repeats):
    """Yield the rows of the script for one GPU, and of the naive version."""
    device, train_set = get_device(), dogs_vs_cats()[0]
    own = Setup(backbone, device)
    other = Setup(backbone, device, torch.contiguous_format)
    few = pick_images(train_set, 8 * BATCH)
    naive_loader = naive_photos.make_loader(image_folder(), few, BATCH)

    def naive():
        args = other.model, naive_loader, script.criterion, other.optimizer, device
        naive_photos.train(*args)
        return len(few)

    cases = timing.make_cases(own.train, train_set, BATCH, device)
    speeds = timing.measure(cases | {"naive": naive}, repeats)
    name = f"pytorch_dvc_cnn_pretrained.py, {backbone}"
    yield from timing.ceiling_rows(name, speeds["script"], speeds["ceiling"])
    yield timing.make_row(name, "naive", speeds["naive"])
    yield timing.make_row(name, "script / naive", speeds["script"], speeds["naive"])


def backbone_scaling(backbone, repeats):
    """Return the rows of all processes against one; all ranks call this."""
    device = get_device(get_ranks()[1])
    alone, own = Setup(backbone, device), Setup(backbone, device)
    ddp_model = DistributedDataParallel(own.model)
    images = torch.randint(0, 256, (BATCH, 3, 150, 150), dtype=torch.uint8)
    batch = images.to(device), torch.zeros(BATCH, device=device)

    def together(loader):
        multigpu.train(ddp_model, loader, own.optimizer, device)

    name = f"pytorch_dvc_cnn_pretrained_multigpu.py, {backbone}"
    return timing.scaling_rows(name, batch, alone.train, together, repeats)


def single(repeats):
    yield from input_rows(repeats)
    for backbone in BACKBONES:
        yield from backbone_rows(backbone, repeats)


def scaling(repeats):
    for backbone in BACKBONES:
        yield from backbone_scaling(backbone, repeats)


if __name__ == "__main__":
    timing.main(single, scaling)
