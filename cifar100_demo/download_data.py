"""Download of CIFAR-100, on a login node: compute nodes usually have no network.

    python download_data.py
    python download_data.py --from FOLDER   # a folder that holds cifar-100-python/

The data goes to DATADIR or, if that is not set, to data/ in the repository.
"""

import common.cli  # noqa: F401, first: it reports missing packages in one line

# isort: split
from torchvision.datasets import CIFAR100

from common.download import download_torchvision


def main():
    download_torchvision(__doc__, CIFAR100, "cifar-100-python")


if __name__ == "__main__":
    main()
