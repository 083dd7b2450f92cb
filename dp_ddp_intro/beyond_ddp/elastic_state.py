"""The checkpoint of a run whose number of GPUs changes."""

import os

import torch
import torch.distributed as dist

from common.checkpoint import save_atomically
from common.cli import UserError


def save_checkpoint(args, epoch, model, optimizer):
    """Write args.checkpoint, which replaces the old one as a whole."""
    state = {"epoch": epoch, "model": model.state_dict()}
    state["optimizer"] = optimizer.state_dict()
    save_atomically(state, args.checkpoint)


def load_checkpoint(args, model, optimizer):
    """Load args.checkpoint if it exists; return how many epochs it has, else 0.

    All ranks must call this. Raises UserError if they read different checkpoints, or
    one of another model or of all epochs.
    """
    file, saved = args.checkpoint, {"epoch": 0}
    if os.path.exists(file):
        saved = torch.load(file, "cpu")
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, saved["epoch"])
    if len({*found}) > 1:
        line = f"{file} has {found} epochs on ranks 0 to {len(found) - 1}"
        raise UserError(f"{line}; put it on a disk that all nodes share")
    if saved["epoch"] >= args.epochs:
        line = f"{file} has {saved['epoch']} epochs"
        raise UserError(f"{line}; delete it, or use --epochs {saved['epoch'] + 1}")
    if saved["epoch"]:
        try:
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
        except RuntimeError:
            raise UserError(
                f"{file} is of another model; delete it, or use its options"
            ) from None
    return saved["epoch"]
