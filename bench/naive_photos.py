"""The naive version of exercise 8's input: as most tutorials load photos."""

from functools import partial

from torch.utils.data import DataLoader
from torchvision import transforms
from torchvision.datasets import ImageFolder

from common.data import data_dir
from common.prepare import read_photo
from dataset import NAME, RAW, SIZE

BATCH = 25
# Real photos, larger than synthetic ones, are decoded at half size and reach 2.2.
GOAL = 1.25
transform = transforms.Compose(
    [
        transforms.Resize((SIZE, SIZE)),
        transforms.RandomAffine(0, scale=(0.8, 1.2), shear=11),
        transforms.RandomHorizontalFlip(),
        transforms.ToTensor(),
    ]
)


def make_loaders():
    """Return loaders that read photos as download_data.py does, and naively."""
    folder, read = data_dir(NAME) / RAW / "train", partial(read_photo, size=SIZE)
    photos = ImageFolder(folder, loader=read)
    return {
        "preparing (once)": DataLoader(photos, BATCH, shuffle=True),
        "naive": DataLoader(ImageFolder(folder, transform), BATCH, shuffle=True),
    }
