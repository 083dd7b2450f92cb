"""Data sets as one .pt file per split, made once, on a login node.

A job that decoded images would keep its GPU waiting, and pay for it.
"""

import os
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from PIL import Image
from torch.utils.data import DataLoader
from torchvision.datasets import ImageFolder
from torchvision.transforms.functional import pil_to_tensor
from tqdm import tqdm


def save_split(folder, split, images, labels):
    """Save folder/SPLIT.pt for load_prepared(), and print its name and size.

    images: uint8 (N, C, H, W); labels: int64 (N,).
    """
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{split}.pt"
    # First in a temporary folder: if this is killed, no half file is left, and two
    # runs can write at the same time.
    with TemporaryDirectory(dir=folder) as own:
        part = Path(own, file.name)
        with part.open("wb") as stream:  # torch.save(path) would hide a full disk
            torch.save({"images": images, "labels": labels}, stream)
        part.replace(file)
    print(f"{file}: {len(labels):,} images, {file.stat().st_size / 1e6:.1f} MB")


def prepare(source, target, splits, size):
    """Save target/SPLIT.pt from the images in source/SPLIT/CLASS/, on several cores.

    Images are resized to size x size pixels, sorted by class, then by name. Labels
    are 0, 1, ... in the order of the classes' names. A split must fit into memory.
    Raises FileNotFoundError if a split or the images of a class are missing. For a
    damaged image, Pillow raises an error with the file's name.
    """
    read = partial(read_photo, size=size)
    for split in splits:
        photos = ImageFolder(source / split, loader=read)
        # At most 16, because others use the login node too.
        workers = min(16, len(os.sched_getaffinity(0)))
        loader = DataLoader(photos, batch_size=16, num_workers=workers)
        images = torch.empty(len(photos), 3, size, size, dtype=torch.uint8)
        done = 0
        for batch, _ in tqdm(loader, split, leave=False, disable=None):
            # Copy at once to free the worker's batch, which holds open files and
            # shared memory: both are scarce in containers.
            images[done : done + len(batch)] = batch
            done += len(batch)
        save_split(target, split, images, torch.tensor(photos.targets))


def read_photo(file, size):
    """Return an image file as uint8 (3, size, size), or raise Pillow's error."""
    with Image.open(file) as photo:
        photo.draft("RGB", (size, size))  # lets libjpeg decode at 1/2, 1/4 or 1/8
        photo = photo.convert("RGB")
        return pil_to_tensor(photo.resize((size, size), Image.Resampling.BILINEAR))
