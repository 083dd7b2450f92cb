"""Data sets and loaders: uint8 batches on the host, arithmetic on the device."""

import functools
import os
import zipfile
from pathlib import Path

import torch
from torch.utils.data import DataLoader, Dataset, default_convert

from common.cli import UserError

REPOSITORY = Path(__file__).resolve().parent.parent
SYNTHETIC_DIR = REPOSITORY / "data" / "sample"


def data_root():
    """Return the folder of all data sets: DATADIR, or the repository's data/."""
    return Path(os.environ.get("DATADIR") or REPOSITORY / "data")


def data_dir(name):
    """Return the folder of a data set, or raise UserError if it is not there."""
    folder = data_root() / name
    if not os.path.isdir(folder):  # or this user may not see it
        what = f"no data in {folder}: run `python download_data.py`, or for"
        make = f"`python sample_data.py` and `export DATADIR={SYNTHETIC_DIR}`"
        raise UserError(f"{what} synthetic data {make}")
    return folder


class InMemoryDataset(Dataset):
    """Tensors in memory: images (N, C, H, W) and their labels (N,)."""

    def __init__(self, images, labels):
        self.images, self.labels = images, labels

    def __len__(self):
        return len(self.labels)

    def __getitems__(self, indices):  # a whole batch at a time
        indices = torch.tensor(indices)  # images[indices] takes 9 times as long
        return self.images.index_select(0, indices), self.labels[indices]


def prepared_file(folder, split, size):
    """Return the file that common/prepare.py writes for a split."""
    return folder / f"{split}-{size}.pt"


def load_prepared(name, splits, size, classes):
    """Return an InMemoryDataset of uint8 images (N, 3, size, size) for each split.

    Labels are 0 to classes - 1. The files are mapped into memory, so all processes
    of a node share one copy. Raises UserError if a file is missing, damaged,
    unreadable, or has other images.
    """
    folder, sets = data_dir(name), []
    again = "run `python download_data.py` on a login node"
    for split in splits:
        file = prepared_file(folder, split, size)
        try:
            # Checking the checksums also reads the file into memory from end to end.
            # Random reads are slow on a shared file system.
            with zipfile.ZipFile(file) as archive:
                if damaged := archive.testzip():
                    raise ValueError(f"{damaged} is damaged")
            content = torch.load(file, "cpu", mmap=True, weights_only=True)
            images, labels = content["images"], content["labels"]
            shape = (len(labels), 3, size, size)
            if images.shape != shape or images.dtype != torch.uint8:
                raise ValueError(f"images {[*images.shape]}, {images.dtype}")
            if (
                labels.dtype != torch.int64
                or not 0 <= labels.min() <= labels.max() < classes
            ):
                raise ValueError(f"labels are not from 0 to {classes - 1}")
            sets.append(InMemoryDataset(images, labels))
        except FileNotFoundError:
            what = f"{folder} is not prepared, it has no {file.name}: {again}"
            raise UserError(what) from None
        except Exception as error:
            why = str(error).partition("\n")[0] or type(error).__name__
            what = f"cannot read {file} ({why}): if it is damaged, delete it, and"
            raise UserError(f"{what} {again}") from None
    return sets


def make_loader(dataset, batch_size, device, *, sampler=None, workers=0, **options):
    """Return a DataLoader of batches (images, labels) from a set with __getitems__.

    workers: loader processes. Usually none: handing over a batch takes longer than
    picking it from memory. options: more options of DataLoader, such as drop_last.
    """
    options |= {"pin_memory": device.type != "cpu", "sampler": sampler}
    options |= {"persistent_workers": workers > 0, "collate_fn": default_convert}
    return DataLoader(dataset, batch_size, num_workers=workers, **options)


@functools.cache  # one copy per device: a copy in each step would wait for it
def per_channel(device, *values):
    """Return values for each channel, scaled from 0..1 to 0..255: (n, C, 1, 1)."""
    return torch.tensor(values, device=device).mul(255).view(len(values), -1, 1, 1)


def normalise(images, mean, std):
    """Return uint8 images (N, C, H, W) as floats of mean 0 and deviation 1, roughly.

    mean, std: of each channel, on a scale from 0 to 1.
    """
    mean, std = per_channel(images.device, mean, std)
    return images.float().sub_(mean).div_(std)
