"""Files that are whole or not there: a run that is killed leaves no half of one."""

import os
from pathlib import Path

import torch

from common.cli import UserError


def can_write(file):
    """Raise UserError if this file cannot be saved: better now than at the end."""
    folder = os.path.dirname(os.path.abspath(file))
    if os.path.isdir(file) or not os.access(folder, os.W_OK):
        raise UserError(f"cannot write {file}: make {folder} writable")


def save(state, file):
    """Save what torch.load() reads, under a temporary name until it is complete."""
    part = f"{file}.{os.getpid()}.part"
    try:
        torch.save(state, part)
        os.replace(part, file)
    except (OSError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        Path(part).unlink(missing_ok=True)
        raise UserError(f"cannot save {file} ({reason}): make room for it") from None
