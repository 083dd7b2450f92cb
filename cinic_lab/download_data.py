"""Downloads CINIC-10, 270,000 images, and prepares it for the scripts.

    python download_data.py              # from Edinburgh, 690 MB
    python download_data.py --from DIR   # the folder with train/, valid/ and test/

Run it once, on a login node: compute nodes usually have no network. The data goes to
DATADIR or, if that is not set, to data/ in the repository.
"""

import shutil

from common.download import download_images
from common.errors import run
from dataset import NAME, RAW, SIZE, SPLITS

URL = "https://datashare.ed.ac.uk/bitstream/handle/10283/3192/CINIC-10.tar.gz"
MD5 = "6ee4d0c996905fe93221de577967a372"


def unpack(archive, folder):
    """Unpack SPLIT/CLASS/*.png."""
    print(f"Unpacking to {folder}", flush=True)
    shutil.unpack_archive(archive, folder, "gztar")  # its MD5 is checked


def main():
    download_images(__doc__, NAME, RAW, URL, unpack, SPLITS, SIZE, MD5)


if __name__ == "__main__":
    run(main)
