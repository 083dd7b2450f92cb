"""The naive version of MNIST: the same model, as most tutorials train it.

As a program it reads lines. For each it trains STEPS steps and prints the number of
images.
"""

import sys
from itertools import islice

from torch import optim
from torch.nn import functional as F
from torch.utils.data import DataLoader
from torchvision import transforms
from torchvision.datasets import MNIST

from common import watchdog
from common.data import REPOSITORY, data_root
from common.device import get_device

BATCH = 128
transform = transforms.Compose(
    [transforms.ToTensor(), transforms.Normalize((0.1307,), (0.3081,))]
)


def make_loader(root):
    return DataLoader(MNIST(root, transform=transform), BATCH, shuffle=True)


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
    sys.path.insert(0, str(REPOSITORY / "mnist_multigpu"))
    from mnist_singlegpu import Net

    watchdog.stop()  # it would see no steps here
    device, steps = get_device(), int(sys.argv[1])
    model, loader = Net().to(device), make_loader(data_root())
    optimizer = optim.Adadelta(model.parameters(), 1.0)
    for _ in sys.stdin:
        print(train(model, loader, optimizer, device, steps), flush=True)
