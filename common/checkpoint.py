"""Files that are whole or not there: a run that is killed leaves no half of one."""

import os
from pathlib import Path

import torch

from common.cli import UserError


def can_write(file):
    """Raise UserError if this file cannot be saved: better now than at the end."""
    if os.path.isdir(file) or not os.access(Path(file).absolute().parent, os.W_OK):
        raise UserError(f"cannot write {file}: make its folder writable")


def save(state, file):
    """Save what torch.load() reads, under a temporary name until it is complete."""
    part = Path(f"{file}.{os.getpid()}.part")
    try:
        torch.save(state, part)
        part.replace(file)
        for old in part.parent.glob(f"{Path(file).name}.*.part"):  # of killed saves
            if os.stat(file).st_mtime > old.stat().st_mtime + 600:
                old.unlink(missing_ok=True)
    except (OSError, RuntimeError) as e:
        part.unlink(missing_ok=True)
        raise UserError(f"cannot save {file}: disk full? make room ({e})") from None
