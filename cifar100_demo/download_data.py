"""Fetches CIFAR-100, on a login node: compute nodes mostly have no network.

    python download_data.py
    python download_data.py --from FOLDER   # that holds cifar-100-python/

It goes to DATADIR, or else to data/ in the repository.
"""

from torchvision.datasets import CIFAR100

from common.download import download_torchvision


def main():
    download_torchvision(__doc__, CIFAR100, "cifar-100-python")


if __name__ == "__main__":
    main()
