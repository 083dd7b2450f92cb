"""Tensors that no optimizer updates: buffers, and copies of a model such as an EMA.

tensors      name (class, first line and number of a module), when ("first": at the
             first step, "end", or "": after an evaluation), evaluated (whether the
             module was evaluated since the last step), trains (its mode), names,
             values (checksums)
saved        the state of a module is saved: name
called       a module is called without gradients: name
loaded       missing (names that differ from the checkpoint's by `module.` alone)
"""

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel as DDP

from ddp_checkup.hooks import ddp, steps
from ddp_checkup.hooks.checksums import checksums, is_dtensor
from ddp_checkup.hooks.wrapping import wrap
from ddp_checkup.trace import trace, user_line


class Module:
    """A module with its name, and the steps at its last call and its last eval()."""

    def __init__(self, module, name):
        self.module, self.name = module, name
        self.called = self.evaluated = None


def reset():
    global seen, optimized, evaluated, noted
    seen = {}  # Modules by id
    optimized = set()  # ids of parameters of optimizers
    evaluated = 0  # steps at the last eval() of any module
    noted = set()  # (kind, name) of events that are noted once


def module_of(values):
    module = values[0].module if isinstance(values[0], DDP) else values[0]
    if id(module) not in seen:
        place = type(module).__name__, user_line()
        number = sum(other.name[:2] == place for other in seen.values())
        seen[id(module)] = Module(module, (*place, number))
    return seen[id(module)]


def before_switch(name, values):
    """Note a module's tensors after its evaluation, at train() after eval()."""
    global evaluated
    entry, evaluates = module_of(values), False in values[1:]
    turns_on = not evaluates and not entry.module.training
    if turns_on:
        note_tensors(entry)
    entry.evaluated = trace.step if evaluates else None
    evaluated = trace.step if evaluates else evaluated


def note_once(kind, name):
    if (kind, name) not in noted:
        noted.add((kind, name))
        trace.add(kind, line=user_line(), name=name)


def before_save(name, values):
    note_once("saved", module_of(values).name)


def after_load(result, values):
    """Note a checkpoint that fits but for `module.`; strict=False raises no error.

    load_state_dict() returns the missing names and the unexpected ones.
    """
    missing, unexpected = map(set, result or [(), ()])
    renamed = {f"module.{name}" for name in missing} & unexpected
    renamed |= {f"module.{name}" for name in unexpected} & missing
    trace.add("loaded", line=user_line(), missing=sorted(missing if renamed else ()))


def note_tensors(entry, when=""):
    module = entry.module
    loops = [e for e in trace.of("loop") if e.batches and not e.steps]
    # A trainer may go on with training without calling train().
    looped = any(e.first == e.last == entry.evaluated for e in loops)
    was_evaluated = trace.step == entry.evaluated and looped
    was_evaluated |= trace.step == entry.called == entry.evaluated
    norms = [part for part in module.modules() if isinstance(part, _NormBase)]
    # DDP leaves each rank its own statistics after a training step.
    left_out = {id(b) for norm in norms for b in norm.buffers() if not was_evaluated}
    named = [*module.named_buffers(), *module.named_parameters()]
    named = [(name, t) for name, t in named if id(t) not in left_out | optimized]
    named = dict((name, t) for name, t in named if not is_dtensor(t))
    trace.add(
        "tensors",
        name=entry.name,
        line=user_line(),
        when=when,
        evaluated=was_evaluated,
        trains=module.training,
        names=[*named],
        values=checksums(named.values()),
    )


def note_first(parameters):
    """Note all modules at the first step."""
    optimized.update(map(id, parameters))
    for entry in [*seen.values()] if parameters else ():
        note_tensors(entry, "first")


def before_enter(name, values):
    """Note which modules a block without gradients calls, such as an EMA.

    A hook on all modules takes time at every call of every layer, and would become
    a part of compiled graphs, so it is set only within such blocks.
    """
    if trace.step and not steps.depth and not ddp.compiles:
        vars(values[0])["checkup"] = register_module_forward_pre_hook(note_call)


def before_exit(name, values):
    if handle := vars(values[0]).pop("checkup", None):
        handle.remove()


def note_call(module, inputs):
    entry = seen.get(id(module))
    if entry:
        note_once("called", entry.name)
        if not module.training:
            entry.called = trace.step


def finish():
    for entry in seen.values():
        note_tensors(entry, "end")


def unless_within(before):
    """Return a hook that skips the calls that a module makes for its parts."""
    return lambda name, values: trace.switching or before(name, values)


def install():
    for owner in torch.no_grad, torch.inference_mode:
        wrap(owner, "__enter__", before=before_enter)
        wrap(owner, "__exit__", before=before_exit)
    wrap(nn.Module, "load_state_dict", after=after_load)
    for name, before in (
        ("train", before_switch),
        ("_apply", lambda _, values: module_of(values)),
        ("state_dict", before_save),
    ):
        wrap(nn.Module, name, unless_within(before), during="switching")
