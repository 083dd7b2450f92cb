"""Downloads VGG16's ImageNet weights.

    python download_weights.py              # 530 MB

Run it on a login node: compute nodes usually have no network. The weights go to
torch.hub's folder: ~/.cache/torch, or TORCH_HOME if that is set. After an
interrupted download, run the command again.
"""

import os

import common.cli  # noqa: F401, first: it reports missing packages in one line

# isort: split
from backbones import VGG16_URL, WEIGHTS
from common.cli import OptionParser
from common.download import fetch


def main():
    parser = OptionParser(__doc__)
    parser.add_argument("--url", default=VGG16_URL, help="address of the weights")
    args = parser.parse_args()
    file = WEIGHTS["vgg16"]
    if not os.path.exists(file):  # Path.exists() raises if the folder is unreadable
        # PyTorch's file name ends with the first digits of the checksum.
        checksum = file.stem.split("-")[1]
        fetch(args.url, file, checksum, algorithm="sha256")
    print(f"{file} is ready")


if __name__ == "__main__":
    main()
