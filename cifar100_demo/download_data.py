"""Fetches CIFAR-100, on a login node: compute nodes mostly have no network.

    python download_data.py
    python download_data.py --from FOLDER   # that holds train, test and meta

It goes to DATADIR, or else to data/ in the repository.
"""

from torchvision.datasets import CIFAR100

from common.download import by_torchvision


def main():
    by_torchvision(__doc__, CIFAR100, "cifar-100-python", ["meta", "train", "test"])


if __name__ == "__main__":
    main()
