"""The batch and the checkpoint of a run whose number of GPUs changes."""

import os

import torch
import torch.distributed as dist

from common.cli import UserError


def split_evenly(batch_size, world_size):
    """Return the batch size per GPU; raise UserError if it is not whole."""
    if batch_size % world_size:
        raise UserError(
            f"a batch of {batch_size} cannot be split over {world_size} GPUs; "
            f"use --batch-size {-(-batch_size // world_size) * world_size}"
        )
    return batch_size // world_size


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
