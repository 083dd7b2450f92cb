"""Atomic writes: a killed run leaves no partial file."""

import os
import shutil
from pathlib import Path

import torch

from common.cli import UserError


def check_writable(file):
    """Raise UserError before the training if this file cannot be saved."""
    if os.path.isdir(file) or not os.access(Path(file).absolute().parent, os.W_OK):
        raise UserError(f"cannot write {file}: make its folder writable")


def save_atomically(state, *files):
    """Save a state for torch.load() to each of these files, in this order.

    Until a file is complete, its name ends in .part.
    """
    parts = [Path(f"{file}.part") for file in files]
    try:
        torch.save(state, parts[0])
        for part in parts[1:]:
            shutil.copyfile(parts[0], part)
        for part, file in zip(parts, files, strict=True):
            part.replace(file)
    except (OSError, RuntimeError) as error:
        for part in parts:
            part.unlink(missing_ok=True)
        what = f"cannot save {files[0]}: disk full? make room ({error})"
        raise UserError(what) from None
