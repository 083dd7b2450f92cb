"""Checkpoints of a model whose parameters and optimizer state are in shards."""

import pickle
from contextlib import contextmanager
from enum import EnumMeta
from pathlib import Path

import torch.distributed as dist
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from common.cli import UserError

METADATA = ".metadata"  # torch.distributed.checkpoint renames it to this at the end
# What it is made of: metadata.py and filesystem.py of torch.distributed.checkpoint.
KNOWN = {
    *("Metadata", "MetadataIndex", "StorageMeta", "_StorageInfo", "PosixPath"),
    *("TensorStorageMetadata", "ChunkStorageMetadata", "BytesStorageMetadata"),
    *("TensorProperties", "_MEM_FORMAT_ENCODING", "_get_layout", "Size"),
    *("float32", "bfloat16", "int64"),
}


class MetadataUnpickler(pickle.Unpickler):
    """Reads METADATA alone: a pickle can name any function, to be called."""

    def find_class(self, module, name):
        if module.split(".")[0] in ("torch", "pathlib") and name in KNOWN:
            return super().find_class(module, name)
        if (module, name) == ("builtins", "getattr"):  # by Python 3.11.0 to 3.11.3
            return EnumMeta.__getitem__  # for the members of enums, no more
        raise pickle.UnpicklingError(f"it would call {module}.{name}")


class State:
    """What torch.distributed.checkpoint saves and loads: it calls the two methods.

    state.epoch: how many are complete. state.folder: of this run, on all ranks that
    of rank 0; all nodes must see it.
    """

    def __init__(self, model, optimizer, log):
        self.model, self.optimizer, self.epoch = model, optimizer, 0
        folder = [log.folder]
        dist.broadcast_object_list(folder)
        self.folder = folder[0]

    def state_dict(self):
        """Return this rank's shards, by names that do not depend on the ranks."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "epoch": self.epoch}

    def load_state_dict(self, state):
        parts = {"model_state_dict": state["model"]}
        parts["optim_state_dict"] = state["optimizer"]
        set_state_dict(self.model, self.optimizer, **parts)
        self.epoch = state["epoch"]


@contextmanager
def writing(state, epoch):
    """Give the folder for the state after this epoch; say so once it is whole.

    Each epoch has its own: a run that is killed meanwhile leaves the one before it.
    Raises UserError if it cannot be written.
    """
    state.epoch, folder = epoch, state.folder / f"epoch{epoch}"
    try:
        yield folder
    except CheckpointException as error:
        why = reason(error)
        raise UserError(
            f"cannot save {folder}: disk full? make room ({why})"
        ) from None


@contextmanager
def reading(folder, epochs, state):
    """Give the folder of a checkpoint, if it is whole.

    Raises UserError if it is not, if it is of another model, or if it has so many
    epochs already.
    """
    folder = Path(folder)
    if not (folder / METADATA).is_file():
        whole = Path("logs").glob(f"*/epoch*/{METADATA}")
        newest = max(whole, key=lambda file: file.stat().st_mtime, default=None)
        how = f"use --resume {newest.parent}" if newest else "leave out --resume"
        raise UserError(f"no whole checkpoint in {folder}: {how}")
    try:
        with open(folder / METADATA, "rb") as file:
            MetadataUnpickler(file).load()  # before PyTorch does so without a check
    except Exception as error:
        raise UserError(
            f"{folder / METADATA} is damaged ({error}): use another --resume"
        ) from None
    try:
        yield folder
    except CheckpointException as error:
        raise UserError(
            f"cannot load {folder} ({reason(error)}): use the options of its run "
            "or, if it is damaged, another --resume"
        ) from None
    if state.epoch >= epochs:
        raise UserError(
            f"{folder} has {state.epoch} epochs: use --epochs {state.epoch + 1}"
        )


def reason(error):
    """Return in one line what the first of the ranks says that failed."""
    first = next(iter(error.failures.values()))
    return str(first[0]).splitlines()[0].partition(". ")[0]
