"""Turns images in files into one file of bytes for each split, which scripts map.

This is done once, on a login node, by an exercise's download_data.py or
sample_data.py: a job that decoded them would keep its GPU waiting, and be billed.
"""

import os
from multiprocessing.pool import ThreadPool

import torch
from PIL import Image
from torch.nn import functional as F
from tqdm import tqdm

from common.checkpoint import save
from common.cli import UserError
from common.data import prepared_file

SUFFIXES = {".jpg", ".jpeg", ".png"}
# What Pillow raises for a file that is damaged, or too large to be meant.
UNREADABLE = OSError, SyntaxError, ValueError, Image.DecompressionBombError


def find_images(folder, split, name):
    """Return this folder, or one or two levels below it one that has split/name/."""
    for found in (folder, *folder.glob("*/"), *folder.glob("*/*/")):
        half_unpacked = ".part" in str(found.relative_to(folder))
        if os.path.isdir(found / split / name) and not half_unpacked:
            return found


def prepare(source, target, splits, classes, size, skip_bad=False):
    """Write the images in source/SPLIT/CLASS/ to a file target/SPLIT-SIZE.pt each.

    A file holds {"images": uint8 (N, 3, size, size), "labels": int64 (N,)}, by class
    and then by name; labels are 0, 1, ... in the order of the classes. It has its
    name when it is whole; one that is there already stays. The images of a split
    must fit into memory, and twice if skip_bad leaves out some that cannot be read.
    Raises UserError if there are such, if a class has none, or if there is no space.
    """
    found = {}
    for split in splits:
        files, labels = found[prepared_file(target, split, size)] = [], []
        for label, name in enumerate(classes):
            every = (source / split / name).glob("*")
            images = sorted(f for f in every if f.suffix.lower() in SUFFIXES)
            if not images:
                where = source / split / name
                raise UserError(
                    f"no images in {where}: add them, or type another --from"
                )
            files += images
            labels += [label] * len(images)
    found = {file: what for file, what in found.items() if not file.exists()}
    if not found:
        return
    count = sum(len(files) for files, _ in found.values())
    megabytes = count * 3 * size * size / 1e6
    print(f"Preparing {count:,} images: {megabytes:,.1f} MB", flush=True)
    for file, (files, labels) in found.items():
        images, readable = read_photos(files, size)
        labels = torch.tensor(labels)
        if bad := [str(f) for f, ok in zip(files, readable, strict=True) if not ok]:
            of_all = f"{len(bad)} of {len(files)} images cannot be read"
            if not skip_bad:
                some = ", ".join(bad[:5]) + " ..." * (len(bad) > 5)
                raise UserError(f"{of_all}: replace {some}, or add --skip-bad")
            print(f"{file.name}: {of_all} and will be missing")
            images, labels = images[readable], labels[readable]
        save({"images": images, "labels": labels}, file)
        for part in target.glob(f"{file.name}.*.part"):  # of calls that were killed
            part.unlink(missing_ok=True)


def read_photos(files, size, threads=None):
    """Return images, uint8 (N, 3, size, size), and which of them are readable (N,).

    The others are black. threads: by default one for each CPU that may be used.
    """
    images = torch.zeros(len(files), 3, size, size, dtype=torch.uint8)
    if threads is None and hasattr(os, "sched_getaffinity"):
        threads = len(os.sched_getaffinity(0))

    def is_readable(i):
        try:
            images[i] = read_photo(files[i], size)
            return True
        except UNREADABLE:
            return False

    # Each thread reads a file of its own, so none helps another one.
    with ThreadPool(threads, torch.set_num_threads, (1,)) as pool:
        done = pool.imap(is_readable, range(len(files)), chunksize=16)
        done = tqdm(done, total=len(files), unit=" images", disable=None)
        return images, torch.tensor(list(done))


def read_photo(file, size):
    """Return an image file as a uint8 tensor (3, size, size).

    Raises one of UNREADABLE if it cannot be read.
    """
    with Image.open(file) as photo:
        photo.draft("RGB", (size, size))  # libjpeg decodes at 1/2, 1/4 or 1/8
        photo = photo.convert("RGB")
        width, height = photo.size
        pixels = bytearray(photo.tobytes("raw", "RGBX"))
    # What Image.resize() gives, to 1 of 255, and faster, most of all with 4 bytes a
    # pixel, which is also how Pillow keeps them.
    pixels = torch.frombuffer(pixels, dtype=torch.uint8).view(1, height, width, 4)
    pixels, shape = pixels.permute(0, 3, 1, 2), (size, size)
    return F.interpolate(pixels, shape, mode="bilinear", antialias=True)[0, :3]
