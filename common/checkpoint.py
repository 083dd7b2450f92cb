"""Files that are whole or not there: a run that is killed leaves no half of one."""

import os

import torch

from common.cli import UserError


def can_write(file):
    """Raise UserError if this file cannot be saved: better now than at the end."""
    folder = os.path.dirname(os.path.abspath(file))
    if os.path.isdir(file) or not os.access(folder, os.W_OK):
        raise UserError(f"cannot write {file} in {folder}: make it writable")


def save(state, file):
    """Save what torch.load() reads, under a temporary name until it is complete."""
    torch.save(state, f"{file}.part")
    os.replace(f"{file}.part", file)
