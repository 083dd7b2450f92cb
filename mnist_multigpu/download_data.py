"""Fetches MNIST, on a login node: compute nodes mostly have no network.

    python download_data.py
    python download_data.py --from FOLDER   # that holds MNIST/raw/

It goes to DATADIR, or else to data/ in the repository.
"""

from torchvision.datasets import MNIST

from common.download import download_torchvision


def main():
    download_torchvision(__doc__, MNIST, "MNIST")


if __name__ == "__main__":
    main()
