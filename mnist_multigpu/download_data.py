"""Downloads MNIST and prepares it for the scripts.

    python download_data.py
    python download_data.py --from DIR   # the folder with MNIST/raw/

Run it once, on a login node: compute nodes usually have no network. The data goes to
DATADIR or, if that is not set, to data/ in the repository.
"""

from torchvision.datasets import MNIST

from common.data import data_dir
from common.download import download_options
from common.errors import explain, run
from common.prepare import save_split
from dataset import NAME, SPLITS


def main():
    args = download_options(__doc__).parse_args()
    folder = data_dir(NAME)
    problem, fix = f"cannot download {NAME}", "try again, on a login node"
    if args.source:
        problem, fix = f"{args.source} does not have the data", "see --help"
    for split in SPLITS:
        root, train = args.source or folder.parent, split == "train"
        with explain(problem, fix):
            digits = MNIST(root, train=train, download=not args.source)
        save_split(folder, split, digits.data.unsqueeze(1), digits.targets)


if __name__ == "__main__":
    run(main)
