"""Data sets in memory, and loaders: uint8 batches, normalised on the device."""

import functools
import os
from pathlib import Path
from zipfile import is_zipfile

import torch
from torch.utils.data import DataLoader, Dataset, default_collate

from common.errors import UserError

REPOSITORY = Path(__file__).resolve().parent.parent


def data_dir(name):
    """Return the folder of a data set: in DATADIR, or in the repository's data/."""
    return Path(os.environ.get("DATADIR") or REPOSITORY / "data", name)


class InMemoryDataset(Dataset):
    """Images (N, C, H, W) and labels (N), or tokens and targets (N, length)."""

    def __init__(self, images, labels):
        self.images, self.labels = images, labels

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return self.images[index], self.labels[index]

    def __getitems__(self, indices):  # DataLoader calls it for a whole batch
        indices = torch.tensor(indices)
        # index_select() is faster than images[indices].
        return self.images.index_select(0, indices), self.labels[indices]


def collate(samples):
    """Return a list of samples as one batch; a tuple is already a batch."""
    return default_collate(samples) if isinstance(samples, list) else samples


def make_loader(dataset, batch_size, device, **options):
    """Return a DataLoader for any data set. options: DataLoader's.

    With pinned memory, `.to(device, non_blocking=True)` returns at once, so the CPU
    can queue the next operations. Workers do not help with data in memory, because
    handing over a batch takes longer than picking it.
    """
    defaults = {"collate_fn": collate, "pin_memory": device.type != "cpu"}
    defaults["persistent_workers"] = options.get("num_workers", 0) > 0
    return DataLoader(dataset, batch_size, **defaults | options)


def load_prepared(name, *splits):
    """Return an InMemoryDataset for each split of a data set: DATADIR/name/SPLIT.pt.

    Images are uint8 (N, C, H, W), labels int64 (N,). All processes of a node
    share one copy. Raises UserError if a file is missing, incomplete or in another
    format.
    """
    sets = []
    for split in splits:
        file = data_dir(name) / f"{split}.pt"
        if not file.exists():
            raise UserError(
                f"no {file}: run `python download_data.py` on a login node, or for "
                "synthetic data `python sample_data.py` and the `export` it prints"
            )
        # Read from start to end into the page cache: on a network file system the
        # random reads of training would be slow.
        with file.open("rb") as stream:
            while stream.read(2**24):
                pass
        saved = read_prepared(file) if is_zipfile(file) else {}
        images, labels = saved.get("images"), saved.get("labels")
        if images is None or images.dtype != torch.uint8 or images.ndim != 4:
            raise UserError(
                f"{file} is not prepared data: run download_data.py again"
            )
        sets.append(InMemoryDataset(images, labels))
    return sets


def read_prepared(file):
    """Return the tensors in a file of torch.save(), by name."""
    try:
        return torch.load(file, mmap=True, weights_only=True)
    except RuntimeError:  # no mmap on this file system: each process keeps a copy
        return torch.load(file, weights_only=True)


@functools.cache  # otherwise the CPU would wait for a copy in every step
def per_channel(values, device):
    """Return one value per channel, times 255, in the shape (C, 1, 1)."""
    return torch.tensor(values, device=device).mul(255).view(-1, 1, 1)


def normalise(images, mean, std):
    """Return uint8 images (N, C, H, W) as floats, standardised per channel.

    mean, std: tuples with one number per channel, on a scale from 0 to 1.
    """
    mean, std = (per_channel(values, images.device) for values in (mean, std))
    return images.float().sub_(mean).div_(std)
