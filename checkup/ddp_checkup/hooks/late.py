"""Functions of modules that a script may import later, or never.

These functions are wrapped when the script makes its process group or an optimizer,
and when it begins a loop over a DataLoader.
"""

import torch.distributed as dist
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from ddp_checkup.hooks.wrapping import rebind, wrap, wrap_if_imported

LATE = []  # (module, function, how it is wrapped)


def wrap_when_imported(module, function, **hooks):
    """Wrap a function of a module as soon as the script has imported it."""
    LATE.append((module, function, hooks))


def wrap_imported():
    """Wrap functions that are imported by now, also under the script's names."""
    wrapped = [
        wrap_if_imported(module, name, **hooks) for module, name, hooks in LATE
    ]
    if any(wrapped):
        rebind()


def install():
    wrap(dist, "init_process_group", after=lambda *_: wrap_imported())
    wrap(Optimizer, "__init__", before=lambda *_: wrap_imported())
    wrap(DataLoader, "__iter__", before=lambda *_: wrap_imported())
