"""Tensors that no optimizer has: buffers, and copies of a model such as an EMA."""

from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parallel import DistributedDataParallel as DDP

from ddp_checkup.hooks.shared import checksums, wrap
from ddp_checkup.record import record, state, user_line


def reset():
    record.tensors, record.first = {}, {}  # by module: notes; checksums at step 1
    state.modules = {}  # by id: [name, module, steps at its last eval()]
    record.saved = {}  # by module: the line that saved its state
    state.switching = ""


def before_call(name, values):
    """Note what a module holds after it was evaluated: at train() after eval()."""
    module = values[0].module if isinstance(values[0], DDP) else values[0]
    if state.switching:  # a part of another
        return
    if id(module) not in state.modules:
        kind = type(module).__name__
        number = sum(entry[0][0] == kind for entry in state.modules.values())
        state.modules[id(module)] = [(kind, number), module, None]
    entry = state.modules[id(module)]
    if name == "state_dict":
        record.saved[entry[0]] = user_line()
    elif name == "train":
        evaluates = False in values[1:]
        if module.training < (not evaluates):
            note_tensors(entry)
        entry[2] = state.steps if evaluates else None


def note_tensors(entry, line=None):
    """Note (line, evaluated, names, checksums, training) of a module."""
    name, module, steps = entry
    loops = [loop for loop in record.epochs if loop.batches and not loop.steps]
    # A trainer may train on without a call of train().
    evaluated = any(loop.first == loop.last == steps for loop in loops)
    evaluated = evaluated and steps == state.steps
    norms = [m for m in module.modules() if isinstance(m, _NormBase)]
    # DDP leaves each rank its own statistics after a training step.
    left_out = {id(b) for m in norms for b in m.buffers() if not evaluated}
    named = [*module.named_buffers(), *module.named_parameters()]
    named = [(n, t) for n, t in named if id(t) not in left_out | state.optimized]
    named = [(n, t) for n, t in named if not isinstance(t, DTensor)]
    values = checksums([t for _, t in named])
    new = line or user_line(), evaluated, [*dict(named)], values, module.training
    if line == "at first":
        record.first[name] = dict(zip(new[2], values, strict=True))
    else:
        record.tensors.setdefault(name, []).append(new)


def install():
    for name in ("train", "_apply", "state_dict"):
        wrap(nn.Module, name, before=before_call, during="switching")
