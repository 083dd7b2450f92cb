"""Hooks append events to the trace while a script runs, and change nothing in it.

install() wraps the functions of PyTorch that a DDP script calls. No hook waits for a
device: checksums stay there until the script has ended.
"""

import sys
import warnings

import torch
from torch.utils._pytree import tree_map_only

from ddp_checkup.hooks import (
    collectives,
    ddp,
    files,
    items,
    late,
    loops,
    modules,
    prints,
    steps,
)
from ddp_checkup.hooks.wrapping import rebind, wrap
from ddp_checkup.trace import HERE, trace, user_frames

WITH_TENSORS = "loop", "step", "weights", "tensors", "dtensor"
MODULES = collectives, ddp, loops, steps, modules, prints, files

__all__ = ["finish", "install", "prints", "rebind", "reset", "steps", "wrap"]


def reset():
    """Start with an empty trace, in a new process and in a forked one."""
    trace.reset()
    late.LATE.clear()
    for module in MODULES:
        module.reset()


def install():
    for module in MODULES:
        module.install()
    late.install()
    original = warnings.showwarning

    def show(message, category, file, line, *others):
        frame = next(user_frames(sys._getframe(1)), None)
        if file.startswith(HERE) and frame:  # the warning is about a hook's caller
            file, line = frame.f_code.co_filename, frame.f_lineno
        original(message, category, file, line, *others)

    warnings.showwarning = show


def finish(done):
    """Return the trace, ready to be sent: with numbers in place of tensors.

    done: whether the script came to its end. If not, a GPU may wait for ever, so
    its tensors are left out.
    """
    trace.finished = done
    first = trace.first("first step")
    can_read = done or first is None or first.device == "cpu"
    read = torch.Tensor.tolist if can_read else lambda tensor: []
    items.finish(done)
    collectives.finish()
    files.finish()
    prints.finish()
    steps.finish(can_read)
    for event in trace.of("failure"):
        event.unused = ddp.unused_parameters(event.error)
    if done:
        modules.finish()
    for kind in WITH_TENSORS:
        for event in trace.of(kind):
            for name, value in vars(event).items():
                setattr(event, name, tree_map_only(torch.Tensor, read, value))
    return trace
