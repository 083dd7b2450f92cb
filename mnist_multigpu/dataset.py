"""MNIST: training and test digits."""

from common.data import load_prepared

NAME, SPLITS = "MNIST", ("train", "test")
# Mean and deviation of the training images, scaled to 0..1.
MEAN, STD = (0.1307,), (0.3081,)


def mnist():
    """Return the training and test sets: uint8 images (N, 1, 28, 28), labels 0 to 9.

    Raises UserError if they are missing.
    """
    return load_prepared(NAME, *SPLITS)
