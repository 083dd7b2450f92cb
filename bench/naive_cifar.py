"""The naive version of CIFAR-100's input: each image is resized on the CPU.

As a program it reads lines. For each it loads STEPS batches and prints the number of
images.
"""

import sys
from itertools import islice

from torch.utils.data import DataLoader, Dataset
from torchvision import transforms

from common.data import REPOSITORY

sys.path.insert(0, str(REPOSITORY / "cifar100_demo"))
from dataset import MEAN, STD, cifar100

BATCH, SIZE = 128, 224
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


def load(loader, steps):
    """Load this many batches; return the number of images."""
    return sum(len(images) for images, _ in islice(loader, steps))


def make_loader():
    train_set, _ = cifar100()
    images = Images(train_set.images, train_set.labels)
    return DataLoader(images, BATCH, shuffle=True)


if __name__ == "__main__":
    loader = make_loader()
    for _ in sys.stdin:
        print(load(loader, int(sys.argv[1])), flush=True)
