"""The naive version of MNIST: the same model, as most tutorials train it.

As a program it reads lines. For each it trains STEPS steps and prints the number of
images.
"""

import sys
from itertools import islice

from torch import optim
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset
from torchvision import transforms

from common.data import REPOSITORY
from common.device import get_device

sys.path.insert(0, str(REPOSITORY / "mnist_multigpu"))
from dataset import mnist

BATCH = 128
transform = transforms.Compose(
    [
        transforms.ToPILImage(),
        transforms.ToTensor(),
        transforms.Normalize((0.1307,), (0.3081,)),
    ]
)


class Digits(Dataset):
    """The digits as torchvision's MNIST returns them, also synthetic ones."""

    def __init__(self, images, labels):
        self.images, self.labels = images, labels

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        return transform(self.images[i]), int(self.labels[i])


def make_loader():
    train_set, _ = mnist()
    digits = Digits(train_set.images, train_set.labels)
    return DataLoader(digits, BATCH, shuffle=True)


def train(model, loader, optimizer, device, steps):
    """Train for this many steps; return the number of images."""
    total_loss = 0.0
    for data, target in islice(loader, steps):
        data, target = data.to(device), target.to(device)
        optimizer.zero_grad()
        loss = F.nll_loss(model(data), target)
        loss.backward()
        optimizer.step()
        total_loss += loss.item()
    return steps * BATCH


if __name__ == "__main__":
    from mnist_singlegpu import Net

    device, steps = get_device(), int(sys.argv[1])
    model, loader = Net().to(device), make_loader()
    optimizer = optim.Adadelta(model.parameters(), 1.0)
    for _ in sys.stdin:
        print(train(model, loader, optimizer, device, steps), flush=True)
