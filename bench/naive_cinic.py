"""The naive version of CINIC-10's input: as most tutorials load the images.

As a program it reads lines. For each it loads COUNT images of FOLDER and prints
their number.
"""

import sys
from itertools import islice

import torch
from torch.utils.data import DataLoader
from torchvision import transforms
from torchvision.datasets import ImageFolder

from common.data import REPOSITORY

sys.path.insert(0, str(REPOSITORY / "cinic_lab"))
from dataset import MEAN, STD

BATCH = 128
transform = transforms.Compose(
    [
        transforms.RandomCrop(32, padding=4),
        transforms.RandomHorizontalFlip(),
        transforms.ToTensor(),
        transforms.Normalize(MEAN, STD),
    ]
)


def make_loader(folder):
    return DataLoader(ImageFolder(folder, transform), BATCH, shuffle=True)


def load(loader, count):
    """Load this many images, in whole batches; return their number."""
    return sum(len(images) for images, _ in islice(loader, count // BATCH))


if __name__ == "__main__":
    torch.set_num_threads(1)
    loader = make_loader(sys.argv[1])
    for _ in sys.stdin:
        print(load(loader, int(sys.argv[2])), flush=True)
