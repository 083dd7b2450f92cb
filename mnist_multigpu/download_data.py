"""Downloads MNIST.

    python download_data.py
    python download_data.py --from FOLDER   # with MNIST/raw/

Run it on a login node: compute nodes usually have no network. The data goes to
DATADIR or, if that is not set, to data/ in the repository.
"""

import common.cli  # noqa: F401, first: it reports missing packages in one line

# isort: split
from torchvision.datasets import MNIST

from common.download import download_torchvision


def main():
    download_torchvision(__doc__, MNIST, "MNIST")


if __name__ == "__main__":
    main()
