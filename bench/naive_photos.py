"""The naive version of exercise 8: the same model, as most tutorials train it.

As a program it reads lines. For each it loads the images INDICES of FOLDER and
prints their number.
"""

import json
import sys

from torch.utils.data import DataLoader, Subset
from torchvision import transforms
from torchvision.datasets import ImageFolder

from common.data import REPOSITORY

sys.path.insert(0, str(REPOSITORY / "exercise8"))
from dataset import MEAN, STD

transform = transforms.Compose(
    [
        transforms.Resize((150, 150)),
        transforms.RandomAffine(0, scale=(0.8, 1.2), shear=11),
        transforms.RandomHorizontalFlip(),
        transforms.ToTensor(),
    ]
)


def make_loader(folder, indices, batch_size):
    return DataLoader(Subset(ImageFolder(folder, transform), indices), batch_size)


def train(model, loader, criterion, optimizer, device):
    normalise = transforms.Normalize(MEAN, STD)
    total_loss, correct = 0.0, 0
    for images, labels in loader:
        images, labels = normalise(images.to(device)), labels.float().to(device)
        output = model(images)
        loss = criterion(output, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total_loss += loss.item()
        correct += ((output > 0) == (labels > 0)).sum().item()
    return total_loss / len(loader), correct


if __name__ == "__main__":
    loader = make_loader(sys.argv[1], json.loads(sys.argv[2]), 25)
    for _ in sys.stdin:
        for _ in loader:
            pass
        print(len(loader.dataset), flush=True)
