"""MNIST: digits to train and to test on."""

from torchvision import datasets

from common.cli import UserError
from common.data import InMemory, data_dir

# Of its training images, scaled to 0..1.
MEAN, STD = (0.1307,), (0.3081,)


def mnist():
    """Return the digits to train and to test on: uint8 images (N, 1, 28, 28).

    Raises UserError if they are not there, or damaged.
    """
    root = data_dir("MNIST").parent
    try:
        splits = [datasets.MNIST(root, train=train) for train in (True, False)]
    except Exception as error:
        raise UserError(
            f"the data in {root / 'MNIST'} is damaged ({error}): delete it and "
            "download it again"
        ) from None
    return [InMemory(split.data[:, None], split.targets) for split in splits]
