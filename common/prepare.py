"""Turns images in files into one file of bytes for each split, which scripts map.

This is done once, on a login node, by an exercise's download_data.py or
sample_data.py: a job that decoded them would keep its GPU waiting, and be billed.
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
# What Pillow raises for a file that is damaged, or too large to be meant.
UNREADABLE = OSError, SyntaxError, ValueError, Image.DecompressionBombError
progress_bar = partial(tqdm, leave=False, disable=None)  # None: on terminals alone


def disk_full_hint(error, otherwise):
    """Return what to do about an error: on a full disk nothing else helps."""
    full = re.search("No space left|quota exceeded", str(error))
    return "the disk is full, make room" if full else otherwise


def find_image_root(folder, split, name):
    """Return this folder, or one or two levels below it one that has split/name/."""
    for found in (folder, *folder.glob("*/"), *folder.glob("*/*/")):
        half_unpacked = ".part" in str(found.relative_to(folder))
        if os.path.isdir(found / split / name) and not half_unpacked:
            return found
    with suppress(FileNotFoundError, NotADirectoryError):
        os.listdir(folder / split / name)  # raises if one may not look into it


def prepare(source, target, splits, classes, size, *, skip_bad=False):
    """Write the images in source/SPLIT/CLASS/ to a file target/SPLIT-SIZE.pt each.

    A file holds {"images": uint8 (N, 3, size, size), "labels": int64 (N,)}, by class
    and then by name; labels are 0, 1, ... in the order of the classes. The images of
    a split must fit into memory, and twice if skip_bad leaves out some. Raises
    UserError if some cannot be read, if a class has none, or if there is no space;
    OSError if one may not be read.
    """
    for split in splits:
        files, labels = [], []
        for label, name in enumerate(classes):
            folder = source / split / name
            images = [f for f in folder.iterdir() if f.suffix.lower() in SUFFIXES]
            if not images:
                raise UserError(
                    f"no images in {folder}: add them, or another --from"
                )
            files += sorted(images)
            labels += [label] * len(images)
        megabytes = len(files) * 3 * size * size / 1e6
        print(f"Preparing {len(files):,} images, {split}: {megabytes:,.1f} MB")
        images, readable = read_photos(files, size)
        labels = torch.tensor(labels)
        if not readable.all():
            bad = [
                str(file) for file, ok in zip(files, readable, strict=True) if not ok
            ]
            count = f"{len(bad)} of {len(files)} images cannot be read"
            if not skip_bad:
                raise UserError(f"{count}: replace {bad[0]} ..., or add --skip-bad")
            print(f"{split}: {count} and will be missing")
            images, labels = images[readable], labels[readable]
            for label, name in enumerate(classes):
                if label not in labels:
                    raise UserError(
                        f"none of {name} can be read: replace {bad[0]} ..."
                    )
        save_atomically(
            {"images": images, "labels": labels}, prepared_file(target, split, size)
        )


def read_photos(files, size, *, threads=8):
    """Return images, uint8 (N, 3, size, size), and which of them are readable (N,).

    The others are black. Raises OSError if one may not be read, or the disk fails:
    that is no damage.
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
    """Return an image file, uint8 (3, size, size), or raise one of UNREADABLE."""
    with Image.open(file) as photo:
        photo.draft("RGB", (size, size))  # libjpeg decodes at 1/2, 1/4 or 1/8
        photo.load()  # raises if the file is damaged
        with suppress(Exception):  # cameras write odd EXIF data
            ImageOps.exif_transpose(photo, in_place=True)
        photo = photo.convert("RGB")
        return pil_to_tensor(photo.resize((size, size), Image.Resampling.BILINEAR))
