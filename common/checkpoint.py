"""Files that are whole or not there: a run that is killed leaves no half of one."""

import os
import shutil
from pathlib import Path

import torch

from common.cli import UserError


def can_write(file):
    """Raise UserError if this file cannot be saved: better now than at the end."""
    if os.path.isdir(file) or not os.access(Path(file).absolute().parent, os.W_OK):
        raise UserError(f"cannot write {file}: make its folder writable")


def save(state, *files):
    """Save what torch.load() reads to each of these files, in this order.

    They have temporary names until all are complete.
    """
    parts = [Path(f"{file}.{os.getpid()}.part") for file in files]
    try:
        torch.save(state, parts[0])
        for part in parts[1:]:
            shutil.copyfile(parts[0], part)
        for part, file in zip(parts, files, strict=True):
            part.replace(file)
            for old in part.parent.glob(
                f"{Path(file).name}.*.part"
            ):  # of killed saves
                if os.stat(file).st_mtime > old.stat().st_mtime + 600:
                    old.unlink(missing_ok=True)
    except (OSError, RuntimeError) as e:
        for part in parts:
            part.unlink(missing_ok=True)
        raise UserError(
            f"cannot save {files[0]}: disk full? make room ({e})"
        ) from None
