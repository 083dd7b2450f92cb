"""CIFAR-100: training and validation images in memory."""

import io
import pickle

import torch

from common.cli import UserError
from common.data import InMemoryDataset, data_dir

# Of the training images, scaled to 0..1.
MEAN, STD = (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)


class ArrayUnpickler(pickle.Unpickler):
    """Load lists and NumPy arrays only: a pickle may call any function it names."""

    def find_class(self, module, name):
        allowed = {"_reconstruct", "_frombuffer", "ndarray", "dtype", "encode"}
        if module.split(".")[0] in ("numpy", "_codecs") and name in allowed:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it would call {module}.{name}")


def cifar100():
    """Return the training and the validation set: uint8 images (N, 3, 32, 32).

    The files are pickles (https://www.cs.toronto.edu/~kriz/cifar.html). Raises
    UserError if one is missing, damaged or unreadable.
    """
    folder = data_dir("cifar-100-python")
    splits = []
    try:
        for file in (folder / "train", folder / "test"):
            content = io.BytesIO(file.read_bytes())
            split = ArrayUnpickler(content, encoding="latin1").load()
            images = torch.from_numpy(split["data"]).view(-1, 3, 32, 32)
            labels = torch.tensor(split["fine_labels"])
            if len(labels) != len(images) or images.dtype != torch.uint8:
                raise ValueError(f"{len(labels)} labels, {len(images)} images")
            if not 0 <= labels.min() <= labels.max() < 100:
                raise ValueError("a label is not in 0..99")
            splits.append(InMemoryDataset(images, labels))
    except FileNotFoundError:
        raise UserError(
            f"no {file}: move {folder} away and run `python download_data.py`"
        ) from None
    except OSError as error:
        raise UserError(f"cannot read {file}: {error.strerror}") from None
    except Exception as error:
        raise UserError(
            f"{file} is damaged ({error}): delete {folder} and download it again"
        ) from None
    return splits
