"""The naive version of MNIST: the same model, as most tutorials train it."""

from itertools import islice

from torch import optim
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset
from torchvision import transforms

from dataset import mnist
from mnist_singlegpu import Net

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


def make_training(device):
    """Return train(steps), which trains for up to an epoch and counts images."""
    model, loader = Net().to(device), make_loader()
    optimizer = optim.Adadelta(model.parameters(), 1.0)

    def train(steps):
        total_loss, images = 0.0, 0
        for data, target in islice(loader, steps):
            data, target = data.to(device), target.to(device)
            optimizer.zero_grad()
            loss = F.nll_loss(model(data), target)
            loss.backward()
            optimizer.step()
            total_loss += loss.item()
            images += len(target)
        return images

    return train
