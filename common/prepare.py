"""Turns images in files into one file of bytes for each split, which scripts map.

This is done once, on a login node, by an exercise's download_data.py or
sample_data.py: a job that decoded them would keep its GPU waiting, and be billed.
"""

import errno
import os
import sys
from contextlib import suppress
from multiprocessing.pool import ThreadPool
from types import SimpleNamespace

import torch
from PIL import Image, ImageOps
from torch.nn import functional as F
from tqdm import tqdm

from common.checkpoint import save
from common.cli import UserError
from common.data import prepared_file

SUFFIXES = (".jpg", ".jpeg", ".png")
# What Pillow raises for a file that is damaged, or too large to be meant.
UNREADABLE = OSError, SyntaxError, ValueError, Image.DecompressionBombError


def bar(items=None, what="", unit="", **options):
    """Return tqdm's bar or, where there is no terminal, lines 30 seconds apart."""
    if not sys.stderr.isatty():
        lines = SimpleNamespace(
            write=lambda t: t.strip() and print(t.strip(), flush=True)
        )
        options |= {"file": lines, "delay": 30, "mininterval": 30, "miniters": 1}
        options |= {"bar_format": "{desc}: {n_fmt} of {total_fmt}{unit}"}
    return tqdm(items, what, leave=False, unit=unit, **options)


def remedy(error, otherwise):
    """Return what to do about an OSError: on a full disk nothing else helps."""
    full = getattr(error, "errno", 0) in (errno.ENOSPC, errno.EDQUOT)
    return "the disk is full, make room" if full else otherwise


def find_images(folder, split, name):
    """Return this folder, or one or two levels below it one that has split/name/."""
    for found in (folder, *folder.glob("*/"), *folder.glob("*/*/")):
        half_unpacked = ".part" in str(found.relative_to(folder))
        if os.path.isdir(found / split / name) and not half_unpacked:
            return found
    with suppress(FileNotFoundError, NotADirectoryError):
        os.listdir(folder / split / name)  # raises if one may not look into it


def is_newest(file, images):
    """Say whether a file is there, and as new as these images and their folders."""
    newest = max(os.stat(f).st_mtime for f in {*images, *(i.parent for i in images)})
    return os.path.exists(file) and os.stat(file).st_mtime >= newest


def prepare(source, target, splits, classes, size, *, skip_bad=False):
    """Write the images in source/SPLIT/CLASS/ to a file target/SPLIT-SIZE.pt each.

    A file holds {"images": uint8 (N, 3, size, size), "labels": int64 (N,)}, by class
    and then by name; labels are 0, 1, ... in the order of the classes. It has its
    name when it is whole; one that is newer than its images stays. The images of a
    split must fit into memory, and twice if skip_bad leaves out some that cannot be
    read. Raises UserError if there are such, if a class has none, or if there is no
    space; OSError if one may not be read. Returns whether it wrote a file.
    """
    found, others = {}, []
    for split in splits:
        files, labels = found[prepared_file(target, split, size)] = [], []
        for label, name in enumerate(classes):
            where = source / split / name
            every = sorted(where.iterdir())
            images = [f for f in every if f.suffix.lower() in SUFFIXES]
            others += set(every) - set(images)
            if not images:
                raise UserError(f"no images in {where}: add them, or another --from")
            files += images
            labels += [label] * len(images)
    found = {f: what for f, what in found.items() if not is_newest(f, what[0])}
    if others and found:
        some = ", ".join(sorted({f.suffix or f.name for f in others})[:9])
        print(f"{len(others)} files left out ({some}): not {', '.join(SUFFIXES)}")
    count = sum(len(files) for files, _ in found.values())
    megabytes = count * 3 * size * size / 1e6
    if found:
        print(f"Preparing {count:,} images: {megabytes:,.1f} MB", flush=True)
    for file, (files, labels) in found.items():
        images, readable = read_photos(files, size)
        labels = torch.tensor(labels)
        if bad := [str(f) for f, ok in zip(files, readable, strict=True) if not ok]:
            of_all = f"{len(bad)} of {len(files)} images cannot be read"
            if not skip_bad:
                some = ", ".join(bad[:5]) + " ..." * (len(bad) > 5)
                some = f"damaged, or too large: replace {some}"
                raise UserError(f"{of_all} ({some}, or add --skip-bad)")
            print(f"{file.name}: {of_all} and will be missing")
            images, labels = images[readable], labels[readable]
        save({"images": images, "labels": labels}, file)
    return bool(found)


def read_photos(files, size, *, threads=None):
    """Return images, uint8 (N, 3, size, size), and which of them are readable (N,).

    The others are black. threads: by default one for each CPU that may be used.
    Raises OSError if one may not be read, or the disk fails: that is no damage.
    """
    images = torch.zeros(len(files), 3, size, size, dtype=torch.uint8)
    if threads is None and hasattr(os, "sched_getaffinity"):
        threads = len(os.sched_getaffinity(0))

    def is_readable(i):
        try:
            images[i] = read_photo(files[i], size)
            return True
        except UNREADABLE as error:
            if getattr(error, "errno", None):  # the system's error, not Pillow's
                raise
            return False

    # Each thread reads a file of its own, so none helps another one.
    with ThreadPool(threads, torch.set_num_threads, (1,)) as pool:
        done = pool.imap(is_readable, range(len(files)), chunksize=16)
        done = bar(done, "preparing", total=len(files), unit=" images")
        return images, torch.tensor(list(done))


def read_photo(file, size):
    """Return an image file, uint8 (3, size, size), or raise one of UNREADABLE."""
    with Image.open(file) as photo:
        photo.draft("RGB", (size, size))  # libjpeg decodes at 1/2, 1/4 or 1/8
        photo.load()
        with suppress(Exception):  # a camera's odd EXIF data: it stays as it is
            ImageOps.exif_transpose(photo, in_place=True)
        if photo.mode[0] == "I":  # 16 bits of grey: convert() takes 255 for white
            photo = photo.point(lambda grey: grey / 256)
        photo = photo.convert("RGB")
        width, height = photo.size
        pixels = bytearray(photo.tobytes("raw", "RGBX"))
    # What Image.resize() gives, to 1 of 255, and faster, most of all with 4 bytes a
    # pixel, which is also how Pillow keeps them.
    pixels = torch.frombuffer(pixels, dtype=torch.uint8).view(1, height, width, 4)
    pixels, shape = pixels.permute(0, 3, 1, 2), (size, size)
    return F.interpolate(pixels, shape, mode="bilinear", antialias=True)[0, :3]
