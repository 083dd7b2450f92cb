"""The naive version of CIFAR-100's input: each image is resized on the CPU."""

import torch
from torch.utils.data import DataLoader, Dataset
from torchvision import transforms

from common.data import make_loader
from dataset import MEAN, STD, cifar100

BATCH, SIZE, GOAL = 128, 224, 50
transform = transforms.Compose(
    [
        transforms.ToPILImage(),
        transforms.Resize(SIZE),
        transforms.ToTensor(),
        transforms.Normalize(MEAN, STD),
    ]
)


class Images(Dataset):
    """The images as torchvision's CIFAR100 returns them, also synthetic ones."""

    def __init__(self, images, labels):
        self.images, self.labels = images, labels

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        return transform(self.images[i]), self.labels[i]


def make_loaders():
    train_set, _ = cifar100()
    images = Images(train_set.images, train_set.labels)
    return {
        "loader": make_loader(train_set, BATCH, torch.device("cpu"), shuffle=True),
        "naive": DataLoader(images, BATCH, shuffle=True),
    }
