"""Download and preparation of CINIC-10, 270,000 images.

    python download_data.py                 # 690 MB from Edinburgh
    python download_data.py --from FOLDER   # a folder with train/, valid/ and test/

Run it once, on a login node: compute nodes usually have no network. The data goes to
DATADIR, or to data/ in the repository. If it is interrupted, run it again.
"""

import tarfile
from itertools import product

from common.download import download_images
from common.errors import UserError, run
from common.prepare import find_image_root, progress_bar
from dataset import CLASSES, NAME, RAW, SIZE, SPLITS

URL = "https://datashare.ed.ac.uk/bitstream/handle/10283/3192/CINIC-10.tar.gz"
MD5 = "6ee4d0c996905fe93221de577967a372"


def unpack(archive, folder):
    """Unpack SPLIT/CLASS/*.png; raise UserError if one of these is missing."""
    with tarfile.open(archive) as images:
        images.extraction_filter = getattr(tarfile, "data_filter", None)
        members = progress_bar(images, "unpacking", unit=" files", total=270_000)
        images.extractall(folder, members)
    root = find_image_root(folder, SPLITS[0], CLASSES[0]) or folder
    for split, name in product(SPLITS, CLASSES):
        if not (root / split / name).is_dir():
            raise UserError(f"no {split}/{name} in it")


def main():
    download_images(__doc__, NAME, RAW, URL, unpack, SPLITS, CLASSES, SIZE, MD5)


if __name__ == "__main__":
    run(main)
