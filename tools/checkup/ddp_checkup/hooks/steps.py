"""Steps of the optimizers: weights, gradients, clipping and random numbers."""

import inspect
import random
import re
import sys
from contextlib import suppress
from math import isclose

import torch
from torch.distributed.tensor import DTensor
from torch.optim import optimizer as optimizers

from ddp_checkup.hooks.loaders import leave_evaluation, next_label
from ddp_checkup.hooks.modules import find_normalisers, note_tensors
from ddp_checkup.hooks.shared import checksums, contents, random_states, wrap
from ddp_checkup.hooks.variables import note_numberings
from ddp_checkup.record import record, state, user_frames, user_line, variables_of

MAX_STEPS = 1000  # compared
PLANNED = "total_steps", "T_max"  # attributes of schedulers
RATES = 5  # learning rates by which a list of them is known
COUNTS = re.compile("step|update|iter|total")  # variables of its function


class StopAfterSteps(BaseException):
    """The script has made as many steps as --steps allows."""


def reset():
    record.device = None  # its type; None before the first step
    record.names, record.models = {}, []  # by id(parameter); per step (line, names)
    record.elements = 0  # of the first optimizer's parameters
    record.start, record.gradients, record.weights = [], [], []  # checksums per step
    # Per step: sums of gradients' absolute values, after all_reduce() and later
    record.undivided = []
    record.passes = []  # per step: backward passes before it
    record.labels = []  # per step: (number of its loop over a loader, step in it)
    record.shards = {}  # by parameter: (coordinates of the shard, shape, checksum)
    record.clips = {}  # by label: (line, norm) of clipped gradients
    record.random, record.sharded = [], False  # random: states of the generators
    record.seeds = {}  # by generator: its seed before the first step
    record.scales = {}  # by label: of a GradScaler
    record.own_averages = False  # whether step() itself averages or gathers
    record.averages = False  # whether the script averages after a backward pass
    state.seeds = {}  # with which Python's and NumPy's generators were seeded
    state.optimizer = None  # whose step() runs
    state.train_loop = None  # the last loop with steps
    state.steps, state.depth = 0, 0  # depth: of optimizers within optimizers
    state.trained, state.last_parameters = set(), []  # batches that made steps
    state.schedulers = []  # (line, the scheduler)
    state.rates = []  # learning rates of the first steps
    state.planned = []  # (line, variable, its length) of lists of learning rates
    state.parameter_sizes = set()  # elements of the first optimizer's parameters
    state.random_loop, state.optimized = None, set()  # optimized: ids of parameters


def parameters(optimizer):
    found = [p for group in optimizer.param_groups for p in group["params"]]
    record.sharded = record.sharded or any(hasattr(p, "device_mesh") for p in found)
    return [] if record.sharded or state.steps >= MAX_STEPS else found


def before_step(optimizer, args, kwargs):
    state.depth += 1
    if state.depth > 1:  # within another
        return
    found = parameters(optimizer)
    state.optimizer = optimizer
    state.optimized.update(map(id, found))
    device = found[0].device if found else torch.device("cpu")
    if not record.start:
        record.start, record.device = [checksums(found)], device.type
        record.seeds = state.seeds | first_seeds(device)
        record.elements = sum(p.numel() for p in found)
        state.parameter_sizes = {p.numel() for p in found}
        note_shards(optimizer)
        state.normalisers = find_normalisers()
        note_numberings()
        for entry in state.modules.values() if found else ():
            note_tensors(entry, "at first")
    leave_evaluation()
    loop = state.epoch
    label = number, steps = next_label(loop)
    if steps == 0 and len(record.random) < 2:
        record.random, state.random_loop = [random_states(device)], number
    elif number == state.random_loop and steps < 5:
        # Between the steps of two optimizers there may be no random numbers.
        record.random[1:] = [random_states(device)]
    if loop is None or loop.batches < loop.length:  # the last one's may be read
        state.trained.add(state.batch)
    if loop:
        if loop.latest is not None:
            record.batches[label], loop.latest = loop.latest, None
        loop.steps += 1
        state.train_loop = loop
    record.labels.append(label)
    record.passes.append(state.passes)
    state.passes = 0
    record.gradients.append(checksums([p.grad for p in found], device))
    note_division(found)
    record.weights.append(checksums(found))  # before the step
    names = [record.names.get(id(p), "a parameter") for p in found]
    names = [f"{name} {(*p.shape,)}" for name, p in zip(names, found, strict=True)]
    record.models.append((user_line(), names))


def after_step(optimizer, args, kwargs):
    state.depth -= 1
    if state.depth:
        return
    state.last_parameters = parameters(optimizer)
    state.steps, state.events = state.steps + 1, state.events + 1
    if state.steps <= RATES:
        rates = [group.get("lr") for group in optimizer.param_groups[:1]]
        # A tensor on a GPU would have to be waited for.
        state.rates += [rate for rate in rates if isinstance(rate, float)]
        if state.steps == RATES and len({*state.rates}) > 2:
            note_planned_rates()
    state.optimizer = None
    state.reduced_storages.clear()
    if state.epoch is None:
        state.batch, state.reduced = state.batch + 1, False
    if state.steps == state.max_steps:
        raise StopAfterSteps


def note_shards(optimizer):
    """Record checksums of DTensors: shards differ, and replicas are equal."""
    tensors = [p for group in optimizer.param_groups for p in group["params"]]
    for number, p in enumerate(tensors, start=1):
        if isinstance(p, DTensor):
            pairs = zip(p.placements, p.device_mesh.get_coordinate(), strict=True)
            # Ranks with the same shard, in one mesh or in another, are replicas.
            place = [c for placement, c in pairs if not placement.is_replicate()]
            for shape, checksum in contents(p.to_local()):
                record.shards[number] = place, shape, checksum


def note_division(parameters):
    """Record whether gradients are still what they were when they had been summed.

    Before they are clipped, if they are. parameters: those of the optimizer.
    """
    if state.summed_gradients and parameters:
        gradients = [p.grad for p in parameters if p.grad is not None]
        now = sum(g.abs().sum() for g in gradients if not g.is_sparse)
        record.undivided.append((sum(state.summed_gradients), now))
    state.summed_gradients.clear()


def before_clip(name, values):
    note_division(state.last_parameters)  # those of values may be a generator


def note_norm(norm):
    """Record the norm by which a rank scales its gradients."""
    placements = norm.placements if isinstance(norm, DTensor) else []
    norm = norm.to_local() if placements else norm
    if state.steps < MAX_STEPS and all(p.is_replicate() for p in placements):
        label = next_label(state.epoch)
        record.clips.setdefault(label, (user_line(), norm.detach()))


def note_scale(name, values):
    # get_scale() would wait for the device; a disabled scaler has none.
    scale = getattr(values[0], "_scale", None)
    if scale is not None and state.steps < MAX_STEPS:
        record.scales[next_label(state.epoch)] = scale.clone()


def after_schedule(result, values):
    state.schedulers.append((user_line(), values[0]))


def note_planned_rates():
    """Note lists of learning rates that the script reads from, step by step.

    Their first numbers are the rates of the first steps, or in proportion to them.
    """
    rates = state.rates
    for frame in user_frames(sys._getframe(1)):
        for name, value in [*variables_of(frame).items(), *frame.f_globals.items()]:
            # A data set would load a sample, and draw random numbers.
            is_array = type(value).__name__ == "ndarray" and value.ndim == 1
            if not (is_array or isinstance(value, list | tuple)):
                continue
            first = [rate for rate in value[:RATES] if isinstance(rate, float)]
            pairs = [*zip(rates, first, strict=False)]
            alike = [isclose(a * first[-1], b * rates[-1]) for a, b in pairs]
            if len(alike) == RATES and all(alike):
                state.planned.append((user_line(), name, len(value)))


def schedules():
    """Return [(line, name, steps that it was made for, steps that it made)]."""
    found = [(*planned, state.steps) for planned in state.planned]
    for line, scheduler in state.schedulers:
        planned = [getattr(scheduler, name, 0) for name in PLANNED]
        for function in getattr(scheduler, "lr_lambdas", []):
            words = {**getattr(function, "keywords", {})}
            words |= getattr(getattr(function, "__self__", None), "__dict__", {})
            with suppress(TypeError, ValueError):  # no function, or unset variables
                words |= inspect.getclosurevars(function).nonlocals
            planned += [words[name] for name in words if COUNTS.search(name)]
        for steps in planned:
            if isinstance(steps, int) and steps:
                name = type(scheduler).__name__
                found.append((line, name, steps, scheduler.last_epoch))
    return found


def note_seed(generator):
    """Return a hook that notes the argument of a generator's seed()."""

    def before(name, values):
        state.seeds[generator] = values[0] if values else None

    return before


def first_seeds(device):
    seeds = {"PyTorch's generator": torch.initial_seed()}
    if device.type != "cpu":
        module = torch.get_device_module(device)
        if hasattr(module, "initial_seed"):
            seeds["the GPU's generator"] = module.initial_seed()
    return seeds


def install():
    utils = torch.nn.utils
    wrap(utils, "clip_grad_norm_", before_clip, lambda norm, _: note_norm(norm))
    wrap(utils, "clip_grads_with_norm_", before=lambda _, args: note_norm(args[2]))
    wrap(torch.amp.GradScaler, "step", before=note_scale)
    scheduler = torch.optim.lr_scheduler.LRScheduler
    wrap(scheduler, "__init__", after=after_schedule)
    wrap(random, "seed", before=note_seed("Python's random"))
    if "numpy" in sys.modules:
        numpy = sys.modules["numpy"].random
        wrap(numpy, "seed", before=note_seed("NumPy's generator"))
    optimizers.register_optimizer_step_pre_hook(before_step)
    optimizers.register_optimizer_step_post_hook(after_step)
