"""Fetches MNIST, on a login node: compute nodes mostly have no network.

    python download_data.py
    python download_data.py --from FOLDER   # that holds MNIST/raw/, or its files

It goes to DATADIR, or else to data/ in the repository.
"""

from torchvision.datasets import MNIST

from common.download import by_torchvision


def main():
    by_torchvision(__doc__, MNIST, "MNIST", "t10k-images-idx3-ubyte", "raw")


if __name__ == "__main__":
    main()
