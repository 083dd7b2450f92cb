"""Tensors that no optimizer has: buffers, and copies of a model such as an EMA."""

from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parallel import DistributedDataParallel as DDP

from ddp_checkup.hooks.shared import checksums, wrap
from ddp_checkup.record import record, state, user_line

MAX_MODULES = 30


def reset():
    record.tensors = {}  # by module: [(line, names, checksums)] after evaluations
    state.modules = {}  # by id: (name, module, batches before its evaluation)
    record.saved = set()  # names of modules whose state was saved
    state.switching = ""


def note_module(module):
    """Return the entry of a module that is moved, switched or saved as a whole."""
    module = module.module if isinstance(module, DDP) else module
    kind = type(module).__name__
    if id(module) not in state.modules and len(state.modules) < MAX_MODULES:
        number = sum(name[0] == kind for name, *_ in state.modules.values())
        state.modules[id(module)] = [(kind, number), module, None]
    return state.modules.get(id(module))


def before_switch(name, values):
    """Note what a module holds after it was evaluated: at train() after eval()."""
    entry = None if state.switching else note_module(values[0])
    if entry and name == "train":
        evaluates = False in values[1:]
        if not evaluates and not entry[1].training:
            note_tensors(entry)
        entry[2] = state.batch if evaluates else None


def before_state_dict(name, values):
    entry = None if state.switching else note_module(values[0])
    if entry:
        record.saved.add(entry[0])


def note_tensors(entry, line=None):
    name, module, batch = entry
    evaluated = batch is not None and batch < state.batch
    norms = [m for m in module.modules() if isinstance(m, _NormBase)]
    # DDP leaves each rank its own statistics after a training step.
    left_out = {id(b) for m in norms for b in m.buffers() if not evaluated}
    named = [*module.named_buffers(), *module.named_parameters()]
    left_out |= state.optimized
    named = [(n, t) for n, t in named if id(t) not in left_out]
    values = checksums([t for _, t in named])
    new = line or user_line(), evaluated, [n for n, _ in named], values
    record.tensors.setdefault(name, []).append(new)


def note_last():
    """Note what all modules hold at the end."""
    for entry in state.modules.values():
        note_tensors(entry, "at the end")


def install():
    wrap(nn.Module, "train", before=before_switch, during="switching")
    wrap(nn.Module, "_apply", before=before_switch, during="switching")
    wrap(nn.Module, "state_dict", before=before_state_dict, during="switching")
