"""Fetches MNIST, on a login node: compute nodes mostly have no network.

    python download_data.py
    python download_data.py --from FOLDER   # that holds MNIST/raw/

It goes to DATADIR, or else to data/ in the repository.
"""

from torchvision.datasets import MNIST

from common.download import by_torchvision

SPLITS, KINDS = ("train", "t10k"), ("images-idx3", "labels-idx1")


def main():
    files = (f"{split}-{kind}-ubyte" for split in SPLITS for kind in KINDS)
    by_torchvision(__doc__, MNIST, "MNIST", list(files), "raw")


if __name__ == "__main__":
    main()
