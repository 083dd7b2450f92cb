"""Downloads MNIST and prepares it for the scripts.

    python download_data.py
    python download_data.py --from DIR   # the folder with MNIST/raw/

Run it once, on a login node: compute nodes usually have no network. The data goes to
DATADIR or, if that is not set, to data/ in the repository.
"""

from torchvision.datasets import MNIST

from common.download import download_options, downloading, target_dir
from common.errors import run
from common.prepare import save_split
from dataset import NAME, SPLITS


def main():
    args = download_options(__doc__).parse_args()
    folder = target_dir(NAME)
    for split in SPLITS:
        root, train = args.source or folder.parent, split == "train"
        with downloading(NAME, args.source):
            digits = MNIST(root, train=train, download=not args.source)
        save_split(folder, split, digits.data.unsqueeze(1), digits.targets)


if __name__ == "__main__":
    run(main)
