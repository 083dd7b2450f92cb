"""Data sets and loaders: uint8 batches from the host, arithmetic on the device."""

import functools
import os
import pickle
from pathlib import Path

import torch
from PIL import Image
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, default_convert

from common.cli import UserError
from common.decoded import decoded

REPOSITORY = Path(__file__).resolve().parent.parent
SAMPLES = REPOSITORY / "data" / "sample"
# Of ImageNet's images, scaled to 0..1: what torchvision's weights expect
# (https://pytorch.org/vision/stable/models.html).
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
# The same of CIFAR-100's training images.
CIFAR100 = (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)
# Of CINIC-10's, as its authors give them (https://github.com/BayesWatch/cinic-10).
CINIC = (0.47889522, 0.47227842, 0.43047404), (0.24205776, 0.23828046, 0.25874835)
CINIC_CLASSES = [
    "airplane",
    "automobile",
    "bird",
    "cat",
    "deer",
    "dog",
    "frog",
    "horse",
    "ship",
    "truck",
]


def data_root():
    """Return where data sets lie: DATADIR, or else the repository's data/."""
    return Path(os.environ.get("DATADIR") or REPOSITORY / "data")


def data_dir(name):
    """Return the folder of a data set, or raise UserError if it is not there."""
    folder = data_root() / name
    if not folder.is_dir():
        raise UserError(
            f"no data in {folder}: type `python -m common.download {name}`, or for "
            "drawings `python -m common.sample_data` and "
            f"`export DATADIR={SAMPLES}`"
        )
    return folder


class InMemory(Dataset):
    """Tensors in memory: images (N, C, H, W) and their labels (N,)."""

    def __init__(self, images, labels):
        self.images, self.labels = images, labels

    def __len__(self):
        return len(self.labels)

    def __getitems__(self, indices):  # a whole batch at a time
        indices = torch.tensor(indices)  # images[indices] is 9 times slower
        return self.images.index_select(0, indices), self.labels[indices]


def decoded_splits(dataset, folder, splits, classes, size):
    """Return an InMemory set for each split: a folder of image files per class.

    Images are decoded once to (3, size, size), see common/decoded.py; labels are 0,
    1, ... in the order of the classes. Raises UserError if a class has no file, or
    if an image is damaged.
    """
    found = {split: ([], []) for split in splits}
    for split, (files, labels) in found.items():
        for label, name in enumerate(classes):
            images = sorted((folder / split / name).glob("*.[jp][pn]g"))
            if not images:
                raise UserError(
                    f"no images in {folder / split / name}, the data set is "
                    "incomplete: delete it and download it again"
                )
            files += images
            labels += [label] * len(images)
    keep = [data_root() / ".decoded", REPOSITORY / "data" / ".decoded"]
    return [
        InMemory(
            decoded(f"{dataset}-{split}", files, size, read_photo, keep),
            torch.tensor(labels),
        )
        for split, (files, labels) in found.items()
    ]


def read_photo(file, size):
    """Return an image file as a uint8 tensor (3, size, size), or raise UserError."""
    try:
        with Image.open(file) as photo:
            photo.draft("RGB", (size, size))  # libjpeg decodes at 1/2, 1/4 or 1/8
            photo = photo.convert("RGB")
            width, height = photo.size
            pixels = bytearray(photo.tobytes("raw", "RGBX"))
    except (OSError, SyntaxError, ValueError) as error:
        raise UserError(f"{file} is damaged ({error}): delete it") from None
    # What Image.resize() gives, to 1 of 255, and faster, most of all with 4 bytes a
    # pixel, which is also how Pillow keeps them.
    pixels = torch.frombuffer(pixels, dtype=torch.uint8).view(1, height, width, 4)
    pixels, shape = pixels.permute(0, 3, 1, 2), (size, size)
    return F.interpolate(pixels, shape, mode="bilinear", antialias=True)[0, :3]


def dogs_vs_cats(size=150):
    """Return the photos to train, validate and test on: cats are 0, dogs are 1."""
    folder = data_dir("dogs-vs-cats") / "train-2000"
    splits, classes = ("train", "validation", "test"), ("cats", "dogs")
    sets = decoded_splits("dogs-vs-cats", folder, splits, classes, size)
    return [InMemory(split.images, split.labels.float()) for split in sets]


def cinic():
    """Return the images to train, validate and test on, and labels 0 to 9."""
    splits = "train", "valid", "test"
    return decoded_splits("CINIC", data_dir("CINIC"), splits, CINIC_CLASSES, 32)


def mnist():
    """Return the digits to train and to test on: uint8 images (N, 1, 28, 28)."""
    from torchvision.datasets import MNIST  # slow to import

    root = data_dir("MNIST").parent
    try:
        splits = [MNIST(root, train=train) for train in (True, False)]
    except Exception as error:
        raise UserError(
            f"the data in {root / 'MNIST'} is damaged ({error}): delete it and "
            "download it again"
        ) from None
    return [InMemory(split.data[:, None], split.targets) for split in splits]


def cifar100():
    """Return the images to train and to validate on: uint8 images (N, 3, 32, 32).

    The files are pickles (https://www.cs.toronto.edu/~kriz/cifar.html). Raises
    UserError if one is damaged.
    """
    folder, splits = data_dir("cifar-100-python"), []
    try:
        for file in (folder / "train", folder / "test"):
            split = pickle.loads(file.read_bytes(), encoding="latin1")
            images = torch.from_numpy(split["data"]).view(-1, 3, 32, 32)
            splits.append(InMemory(images, torch.tensor(split["fine_labels"])))
    except Exception as error:
        raise UserError(
            f"{file} is damaged ({error}): delete {folder} and download it again"
        ) from None
    return splits


def make_loader(dataset, batch_size, device, sampler=None, shuffle=False, workers=0):
    """Return a DataLoader of batches (images, labels) from a set with __getitems__.

    workers: processes that pick the batches. As a rule none: the sets are in memory,
    and a worker takes longer to hand a batch over than to pick it.
    """
    return DataLoader(
        dataset,
        batch_size,
        shuffle,
        sampler,
        num_workers=workers,
        persistent_workers=workers > 0,
        pin_memory=device.type != "cpu",
        collate_fn=default_convert,
    )


@functools.cache  # copied once per device: a copy in each step would wait for it
def pixel_values(device, *values):
    """Return values for each channel, where 1 is 255, as tensors (C, 1, 1)."""
    return torch.tensor(values, device=device).mul(255).view(len(values), -1, 1, 1)


def normalise(images, mean=MEAN, std=STD):
    """Return uint8 images (N, C, H, W) as floats of about mean 0 and deviation 1.

    mean, std: of each channel, where 1 is 255.
    """
    mean, std = pixel_values(images.device, mean, std)
    return images.float().sub_(mean).div_(std)


def normalise_digits(images):
    """Return MNIST's images, normalised by the mean and deviation of its pixels."""
    return normalise(images, (0.1307,), (0.3081,))


def augment(images):
    """Return normalised images (N, 3, H, W), scaled, sheared, some of them mirrored.

    Scale 0.8 to 1.2, shear up to 0.2 of the height, both about the centre and drawn
    for each image. What comes in from outside is 0, the mean colour.
    """
    n, device = len(images), images.device
    scale = torch.empty(n, device=device).uniform_(0.8, 1.2)
    shear = torch.empty(n, device=device).uniform_(-0.2, 0.2)
    mirror = torch.randint(0, 2, (n,), device=device) * 2 - 1
    theta = torch.zeros(n, 2, 3, device=device)
    theta[:, 0, 0], theta[:, 0, 1], theta[:, 1, 1] = (
        mirror / scale,
        shear / scale,
        1 / scale,
    )
    grid = F.affine_grid(theta, images.shape, align_corners=False)
    return F.grid_sample(images, grid, align_corners=False)


def crop_and_flip(images, padding=4):
    """Return images (N, C, H, W), shifted by up to padding pixels, some mirrored.

    Both are drawn for each image; what comes in from outside is 0. Torchvision's
    RandomCrop(H, padding) and RandomHorizontalFlip() do so with one image at a time.
    """
    n, channels, height, width = images.shape
    device = images.device
    y, x = torch.randint(2 * padding + 1, (2, n, 1), device=device)
    mirror = torch.randint(2, (n, 1), device=device, dtype=torch.bool)
    rows, columns = (torch.arange(side, device=device) for side in (height, width))
    rows = y + rows  # of the padded image, that pixels come from: (N, H)
    columns = x + torch.where(mirror, columns.flip(0), columns)  # (N, W)
    source = rows[:, :, None] * (width + 2 * padding) + columns[:, None]
    source = source.view(n, 1, -1).expand(-1, channels, -1)
    padded = F.pad(images, [padding] * 4).flatten(2)
    return padded.gather(2, source).view(images.shape)
