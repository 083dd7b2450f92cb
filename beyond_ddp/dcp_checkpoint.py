"""State, folders and one-line errors for torch.distributed.checkpoint (DCP)."""

import pickle
from contextlib import contextmanager
from enum import EnumMeta
from pathlib import Path

import torch.distributed as dist
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from common.errors import UserError

METADATA = ".metadata"  # DCP writes it under another name, and renames it at the end
# What METADATA may contain; see metadata.py and filesystem.py of DCP.
ALLOWED_NAMES = {
    *("Metadata", "MetadataIndex", "StorageMeta", "_StorageInfo", "PosixPath"),
    *("TensorStorageMetadata", "ChunkStorageMetadata", "BytesStorageMetadata"),
    *("TensorProperties", "_MEM_FORMAT_ENCODING", "_get_layout", "Size"),
    *("float32", "bfloat16", "int64"),
}


class MetadataUnpickler(pickle.Unpickler):
    """An Unpickler for METADATA only, as a pickle can call any function."""

    def find_class(self, module, name):
        if module.split(".")[0] in ("torch", "pathlib") and name in ALLOWED_NAMES:
            return super().find_class(module, name)
        if (module, name) == ("builtins", "getattr"):  # by Python 3.11.0 to 3.11.3
            return EnumMeta.__getitem__  # only for members of enums
        raise pickle.UnpicklingError(f"it would call {module}.{name}")


class AppState:
    """The state that DCP saves and loads through the two methods below.

    state.epoch: completed epochs. state.folder: the folder of rank 0's run, the same
    on all ranks; all nodes must see it.
    """

    def __init__(self, model, optimizer, log):
        self.model, self.optimizer, self.epoch = model, optimizer, 0
        folder = [log.folder]
        dist.broadcast_object_list(folder)
        self.folder = folder[0]

    def state_dict(self):
        """Return this rank's shards; their names do not depend on the ranks."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "epoch": self.epoch}

    def load_state_dict(self, state):
        parts = {"model_state_dict": state["model"]}
        parts["optim_state_dict"] = state["optimizer"]
        set_state_dict(self.model, self.optimizer, **parts)
        self.epoch = state["epoch"]


@contextmanager
def new_checkpoint(state, epoch):
    """Yield the folder for the checkpoint of this epoch.

    Each epoch has its own folder, so a run that is killed while it saves leaves the
    previous checkpoint intact. Raises UserError if saving fails.
    """
    state.epoch, folder = epoch, state.folder / f"epoch{epoch}"
    try:
        yield folder
    except CheckpointException as error:
        raise UserError(f"cannot save {folder}: {first_reason(error)}") from None


@contextmanager
def open_checkpoint(folder, epochs, state):
    """Yield the folder of a complete checkpoint, as a Path.

    Raises UserError if the checkpoint is incomplete, is of another model, or has
    this many epochs already.
    """
    folder = Path(folder)
    if not (folder / METADATA).is_file():
        complete = Path("logs").glob(f"*/epoch*/{METADATA}")
        newest = max(complete, key=lambda file: file.stat().st_mtime, default=None)
        fix = f"use --resume {newest.parent}" if newest else "leave out --resume"
        raise UserError(f"no complete checkpoint in {folder}; {fix}")
    try:
        with open(folder / METADATA, "rb") as file:
            MetadataUnpickler(file).load()  # before DCP does so without a check
    except Exception as error:
        raise UserError(
            f"{folder / METADATA} is damaged ({error}); use another --resume"
        ) from None
    try:
        yield folder
    except CheckpointException as error:
        raise UserError(
            f"cannot load {folder} ({first_reason(error)}); use the options of its "
            "run or, if it is damaged, another --resume"
        ) from None
    if state.epoch >= epochs:
        raise UserError(
            f"{folder} has {state.epoch} epochs; use --epochs {state.epoch + 1}"
        )


def first_reason(error):
    """Return the error of the first rank that failed, in one line."""
    first = next(iter(error.failures.values()))
    return str(first[0]).splitlines()[0].partition(". ")[0]
