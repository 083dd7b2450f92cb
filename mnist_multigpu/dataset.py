"""MNIST: training and test digits."""

import os
from pathlib import Path

from torchvision import datasets

from common.cli import UserError
from common.data import InMemoryDataset, data_dir, data_root

# Mean and deviation of the training images, scaled to 0..1.
MEAN, STD = (0.1307,), (0.3081,)


def mnist():
    """Return the training and test sets: uint8 images (N, 1, 28, 28).

    Raises UserError if they are missing, damaged or unreadable.
    """
    here = Path(__file__).resolve().parent / "data"
    if (here / "MNIST").is_dir() and not (data_root() / "MNIST").is_dir():
        raise UserError(f"no MNIST in {data_root()}; run `export DATADIR={here}`")
    root = data_dir("MNIST").parent
    try:
        os.listdir(f"{root}/MNIST/raw/.")  # raises if the folder is unreadable
        splits = [datasets.MNIST(root, train=train) for train in (True, False)]
        for split in splits:
            images, labels = split.data, split.targets
            if images.shape != (len(labels), 28, 28):
                raise ValueError(f"{len(labels)} labels, images {[*images.shape]}")
            if labels.max() > 9:
                raise ValueError(f"a label is {labels.max()}")
    except OSError as error:
        raise UserError(f"cannot read {error.filename}: {error.strerror}") from None
    except Exception as error:
        cause = str(error) or type(error).__name__
        raise UserError(
            f"the data in {root / 'MNIST'} is damaged ({cause}); delete it and "
            "download it again"
        ) from None
    return [InMemoryDataset(split.data[:, None], split.targets) for split in splits]
