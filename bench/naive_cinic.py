"""The naive version of CINIC-10's input: as most tutorials load the images."""

import torch
from torch.utils.data import DataLoader
from torchvision import transforms
from torchvision.datasets import ImageFolder

from common.data import data_dir, make_loader
from dataset import MEAN, NAME, RAW, STD, cinic

BATCH, GOAL = 128, 20
transform = transforms.Compose(
    [
        transforms.RandomCrop(32, padding=4),
        transforms.RandomHorizontalFlip(),
        transforms.ToTensor(),
        transforms.Normalize(MEAN, STD),
    ]
)


def make_loaders():
    images = ImageFolder(data_dir(NAME) / RAW / "train", transform)
    return {
        "loader": make_loader(cinic()[0], BATCH, torch.device("cpu"), shuffle=True),
        "naive": DataLoader(images, BATCH, shuffle=True),
    }
