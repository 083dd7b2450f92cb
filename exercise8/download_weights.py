"""Fetches VGG16's ImageNet weights, on a login node: compute nodes have no network.

    python download_weights.py              # 530 MB

They go to torch.hub's folder, by default ~/.cache/torch; TORCH_HOME moves it. If it
breaks off, type it again.
"""

import os

from backbones import VGG16_URL, WEIGHTS
from common.cli import OptionParser
from common.download import fetch


def main():
    parser = OptionParser(__doc__)
    parser.add_argument("--url", default=VGG16_URL, help="fetch it from elsewhere")
    args = parser.parse_args()
    file = WEIGHTS["vgg16"]
    if not os.path.exists(file):  # or it may not be looked at
        checksum = file.stem.split("-")[1]  # PyTorch puts its first digits there
        fetch(args.url, file, checksum, algorithm="sha256")
    print(f"{file} is ready")


if __name__ == "__main__":
    main()
