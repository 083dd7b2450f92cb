"""Tensors that no optimizer has: buffers, and copies of a model such as an EMA."""

import gc
import sys

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel as DDP

from ddp_checkup.hooks.loaders import MAX_BATCHES, next_label
from ddp_checkup.hooks.shared import checksums, wrap
from ddp_checkup.record import is_library, record, state, user_line

STATISTICS = "mean", "var", "std"  # attributes of what normalises


def reset():
    record.tensors, record.first = {}, {}  # by module: notes; checksums at step 1
    # By id: [(class, first line, number), module, steps at its last call in eval(),
    # and at its last eval()]
    state.modules = {}
    record.saved = {}  # by module: the line that saved its state
    record.called = {}  # by module: the line that called it without gradients
    record.overwritten = {}  # by label: (line, names, checksums) of buffers
    record.loads = 0  # states that were loaded into modules
    record.not_loaded = None  # (line, names) of a module that got no weights
    state.switching = ""
    state.evaluated_at = 0  # steps at the last eval() of any module
    state.normalisers = []  # the script's objects with a mean and a variance


def before_call(name, values):
    """Note what a module holds after it was evaluated: at train() after eval()."""
    module = values[0].module if isinstance(values[0], DDP) else values[0]
    if state.switching:  # a part of another
        return
    if id(module) not in state.modules:
        place = type(module).__name__, user_line()
        number = sum(entry[0][:2] == place for entry in state.modules.values())
        state.modules[id(module)] = [(*place, number), module, None, None]
    entry = state.modules[id(module)]
    if name == "state_dict":
        record.saved[entry[0]] = user_line()
    elif name == "train":
        evaluates = False in values[1:]
        if module.training < (not evaluates):
            note_tensors(entry)
        entry[3] = state.steps if evaluates else None
        state.evaluated_at = state.steps if evaluates else state.evaluated_at


def after_load(result, values):
    """Note a checkpoint that fits but for `module.`: strict=False does not say it.

    load_state_dict() returns the names that it misses, and those it does not know.
    """
    record.loads += 1
    missing, unexpected = map(set, result or [(), ()])
    for one, other in (missing, unexpected), (unexpected, missing):
        if {f"module.{name}" for name in one} & other:
            record.not_loaded = record.not_loaded or (user_line(), sorted(missing))


def note_tensors(entry, line=None):
    """Note (line, evaluated, names, checksums, training) of a module."""
    name, module, called, steps = entry
    loops = [loop for loop in record.epochs if loop.batches and not loop.steps]
    # A trainer may train on without a call of train().
    evaluated = any(loop.first == loop.last == steps for loop in loops)
    evaluated = (evaluated or called == steps) and steps == state.steps
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


def note_overwritten(ddp):
    """Record the buffers that DDP is about to overwrite by rank 0's.

    Statistics of a BatchNorm are meant so: each rank's are as good as another's.
    """
    if state.steps >= MAX_BATCHES:
        return
    named = {}
    for name, module in ddp.module.named_modules():
        if not isinstance(module, _NormBase):
            for own, buffer in module.named_buffers(recurse=False):
                if own not in module._non_persistent_buffers_set:
                    named[f"{name}.{own}".strip(".")] = buffer
    if named:
        label = next_label(state.epoch)
        sums = checksums(named.values())
        record.overwritten.setdefault(label, (user_line(), [*named], sums))


def elements(value):
    """Return how many an array or a tensor has, 0 for anything else."""
    if isinstance(value, torch.Tensor):
        return value.numel()
    return value.size if hasattr(value, "tobytes") else 0


def find_normalisers():
    """Return the script's objects with a mean and a variance that are no modules.

    Running statistics of observations, for instance. Single numbers may be times.
    """
    found, ours = [], {}
    for each in gc.get_objects():
        kind = type(each)
        if kind not in ours:
            file = getattr(sys.modules.get(kind.__module__), "__file__", None) or "<"
            of_script = kind.__module__ == "__main__" or not is_library(file)
            ours[kind] = of_script and not issubclass(kind, torch.nn.Module)
        if ours[kind]:
            values = getattr(each, "__dict__", {})
            sizes = [elements(values[n]) for n in STATISTICS if n in values]
            if len(sizes) > 1 and min(sizes) > 1:
                found.append(each)
    return found


def before_enter(name, values):
    """Note which modules a block without gradients calls, such as an EMA.

    A hook of all modules takes time at each call of each layer, and would be a part
    of compiled graphs, so it is there within such blocks alone.
    """
    if state.steps and not state.optimizer and not state.compiles:
        handle = register_module_forward_pre_hook(note_call)
        vars(values[0])["checkup_handle"] = handle


def before_exit(name, values):
    if handle := vars(values[0]).pop("checkup_handle", None):
        handle.remove()


def note_call(module, inputs):
    if id(module) in state.modules:
        entry = state.modules[id(module)]
        record.called.setdefault(entry[0], user_line())
        if not module.training:
            entry[2] = state.steps


def install():
    for owner in torch.no_grad, torch.inference_mode:
        wrap(owner, "__enter__", before=before_enter)
        wrap(owner, "__exit__", before=before_exit)
    wrap(nn.Module, "load_state_dict", after=after_load)
    for name in ("train", "_apply", "state_dict"):
        wrap(nn.Module, name, before=before_call, during="switching")
