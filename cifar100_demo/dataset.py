"""CIFAR-100: images to train and to validate on."""

import pickle

import torch

from common.cli import UserError
from common.data import InMemory, data_dir

# Of its training images, scaled to 0..1.
MEAN, STD = (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)


def cifar100():
    """Return the images to train and to validate on: uint8 images (N, 3, 32, 32).

    The files are pickles (https://www.cs.toronto.edu/~kriz/cifar.html). Raises
    UserError if one is missing or damaged.
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
