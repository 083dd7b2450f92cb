"""CIFAR-100: training and validation images."""

from common.data import load_prepared

NAME, SPLITS = "CIFAR-100", ("train", "test")
# Mean and deviation of the training images, scaled to 0..1.
MEAN, STD = (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)


def cifar100():
    """Return the training and the validation set: uint8 images (N, 3, 32, 32).

    Labels are 0 to 99. Raises UserError if the data is missing.
    """
    return load_prepared(NAME, *SPLITS)
