"""Image files to one memory-mapped array per split.

download_data.py and sample_data.py do this once, on a login node. A job that decoded
images would keep its GPU waiting, and pay for it.
"""

import os
import re
from contextlib import suppress
from functools import partial
from multiprocessing.pool import ThreadPool

import torch
from PIL import Image, ImageOps
from torchvision.transforms.functional import pil_to_tensor
from tqdm import tqdm

from common.checkpoint import save_atomically
from common.cli import UserError
from common.data import prepared_file

SUFFIXES = (".jpg", ".jpeg", ".png")
# Pillow's errors for a damaged file, or one of an absurd size.
UNREADABLE = OSError, SyntaxError, ValueError, Image.DecompressionBombError
progress_bar = partial(tqdm, leave=False, disable=None)  # None: only on a terminal


def disk_full_hint(error, otherwise):
    """Return "make room" if the disk is full, else the other advice."""
    full = re.search("No space left|quota exceeded", str(error))
    return "the disk is full, make room" if full else otherwise


def find_image_root(folder, split, name):
    """Return the folder with split/name/: itself, or one within two levels."""
    for found in (folder, *folder.glob("*/"), *folder.glob("*/*/")):
        half_unpacked = ".part" in str(found.relative_to(folder))
        if os.path.isdir(found / split / name) and not half_unpacked:
            return found
    with suppress(FileNotFoundError, NotADirectoryError):
        os.listdir(folder / split / name)  # raises PermissionError


def prepare(source, target, splits, classes, size, *, skip_bad=False):
    """Write target/SPLIT-SIZE.pt from the images in source/SPLIT/CLASS/.

    Each file holds {"images": uint8 (N, 3, size, size), "labels": int64 (N,)},
    sorted by class, then by name; labels are 0, 1, ... in the order of the classes.
    A split must fit into memory; twice if skip_bad drops images. Raises UserError if
    an image is damaged, a class has no images, or the disk is full; OSError if a
    file may not be read.
    """
    for split in splits:
        files, labels = [], []
        for label, name in enumerate(classes):
            folder = source / split / name
            images = [f for f in folder.iterdir() if f.suffix.lower() in SUFFIXES]
            if not images:
                raise UserError(f"no images in {folder}: use another --from")
            files += sorted(images)
            labels += [label] * len(images)
        megabytes = len(files) * 3 * size * size / 1e6
        print(f"Preparing {len(files):,} images, {split}: {megabytes:,.1f} MB")
        images, readable = read_photos(files, size)
        labels = torch.tensor(labels)
        if not readable.all():
            bad = [f for f, ok in zip(files, readable, strict=True) if not ok]
            count = f"{len(bad)} of {len(files)} images cannot be read"
            if not skip_bad:
                raise UserError(f"{count}: replace {bad[0]} ..., or add --skip-bad")
            print(f"{split}: {count} and will be missing")
            images, labels = images[readable], labels[readable]
            for label, name in enumerate(classes):
                if label not in labels:
                    text = f"none of {name} can be read: replace {bad[0]} ..."
                    raise UserError(text)
        content = {"images": images, "labels": labels}
        save_atomically(content, prepared_file(target, split, size))


def read_photos(files, size, *, threads=8):
    """Return images, uint8 (N, 3, size, size), and whether each was readable (N,).

    Unreadable ones are black. Raises OSError for missing permissions or a failing
    disk, since the image itself is not to blame.
    """
    images = torch.zeros(len(files), 3, size, size, dtype=torch.uint8)
    readable = torch.zeros(len(files), dtype=torch.bool)

    def read(i):
        try:
            images[i] = read_photo(files[i], size)
            readable[i] = True
        except UNREADABLE as error:
            if getattr(error, "errno", None):  # the system's error, not Pillow's
                raise

    with ThreadPool(threads, torch.set_num_threads, (1,)) as pool:
        done = pool.imap(read, range(len(files)), chunksize=16)
        for _ in progress_bar(done, "preparing", len(files), unit=" images"):
            pass
    return images, readable


def read_photo(file, size):
    """Return an image as uint8 (3, size, size), or raise one of UNREADABLE."""
    with Image.open(file) as photo:
        photo.draft("RGB", (size, size))  # lets libjpeg decode at 1/2, 1/4 or 1/8
        photo.load()  # raises if the file is damaged
        with suppress(Exception):  # some cameras write invalid EXIF data
            ImageOps.exif_transpose(photo, in_place=True)
        photo = photo.convert("RGB")
        return pil_to_tensor(photo.resize((size, size), Image.Resampling.BILINEAR))
