"""The state that torch.distributed.checkpoint (DCP) saves, and a check before."""

import os
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful

from common.errors import UserError, explain


class AppState(Stateful):
    """Holds model, optimizer and completed epochs; all ranks use rank 0's folder."""

    def __init__(self, model, optimizer, log):
        self.model, self.optimizer = model, optimizer
        self.epoch, self.epochs, folder = 0, log.args.epochs, [log.folder]
        dist.broadcast_object_list(folder)
        self.folder = folder[0]

    def state_dict(self):
        """Return this rank's shards; their names do not depend on world size."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "epoch": self.epoch}

    def load_state_dict(self, state):
        parts = {"model_state_dict": state["model"]}
        parts["optim_state_dict"] = state["optimizer"]
        set_state_dict(self.model, self.optimizer, **parts)
        self.epoch = state["epoch"]
        if self.epoch >= self.epochs:
            problem = f"the checkpoint has {self.epoch} epochs"
            raise UserError(f"{problem}; use --epochs {self.epoch + 1}")


def check_complete(folder):
    """Raise UserError unless this folder has a complete checkpoint of this user.

    DCP writes .metadata last, and renames it when it is complete. It is a pickle,
    which can run code when it is loaded, so other users' files are refused.
    """
    metadata = Path(folder, ".metadata")
    if not metadata.is_file():
        complete = Path("logs").glob("*/epoch*/.metadata")
        newest = max(complete, key=lambda file: file.stat().st_mtime, default=None)
        fix = f"use --resume {newest.parent}" if newest else "leave out --resume"
        raise UserError(f"no complete checkpoint in {folder}; {fix}")
    if metadata.stat().st_uid != os.getuid():
        raise UserError(f"{metadata} of another user may run code; use your own")


@contextmanager
def resuming(folder):
    """Check a folder; turn errors of dcp.load() in this block into a UserError."""
    check_complete(folder)
    with explain(f"{folder} is not a checkpoint of this script", "use another"):
        try:
            yield
        except CheckpointException as error:  # holds each rank's error: show one
            raise next(iter(error.failures.values()))[0] from None
