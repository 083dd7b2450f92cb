"""The checkpoint of a run whose number of GPUs changes."""

from pathlib import Path

import torch
import torch.distributed as dist

from common.errors import UserError, explain


def split_batch(args, world_size):
    """Return the batch size per GPU, or raise UserError if it is not whole."""
    if args.batch_size % world_size:
        raise UserError(
            f"a batch of {args.batch_size} cannot be split over {world_size} GPUs; "
            f"use --batch-size {world_size * -(-args.batch_size // world_size)}"
        )
    return args.batch_size // world_size


def format_options(args):
    """Return the options that a resumed run must have, as typed in a command."""
    names = "sequences", "lr", "layers", "width", "heads", "length", "seed"
    options = [f"--{name} {getattr(args, name)}" for name in names]
    batch_size = args.batch_size * dist.get_world_size()  # of all GPUs
    return " ".join([*options, f"--batch-size {batch_size}"])


def save_checkpoint(args, epoch, model, optimizer):
    """Write a new file, then replace args.checkpoint with it."""
    state = {"epoch": epoch, "options": format_options(args)}
    state["model"], state["optimizer"] = model.state_dict(), optimizer.state_dict()
    part = Path(f"{args.checkpoint}.part")
    with part.open("wb") as stream:  # torch.save(path) would hide a full disk
        torch.save(state, stream)
    part.replace(args.checkpoint)


def load_checkpoint(args, model, optimizer):
    """Load args.checkpoint if it exists; return its completed epochs, else 0.

    All ranks must call this. Raises UserError if the file was saved with other
    options or after the last epoch, or differs between the ranks.
    """
    file, epoch, options = Path(args.checkpoint), 0, format_options(args)
    if file.exists():
        with explain(f"{file} is not a checkpoint of this script", "delete it"):
            saved = torch.load(file, "cpu", weights_only=True)
            epoch, options = saved["epoch"], saved["options"]
            if options == format_options(args):
                model.load_state_dict(saved["model"])
                optimizer.load_state_dict(saved["optimizer"])
    epochs = [None] * dist.get_world_size()
    dist.all_gather_object(epochs, epoch)
    if len({*epochs}) > 1:
        line = f"{file} has {epochs} epochs on ranks 0 to {len(epochs) - 1}"
        raise UserError(f"{line}; put it on a disk that all nodes share")
    if options != format_options(args):
        raise UserError(f"{file} has other options; use {options}, or delete it")
    if epoch >= args.epochs:
        line = f"{file} has {epoch} epochs"
        raise UserError(f"{line}; delete it, or use --epochs {epoch + 1}")
    return epoch
