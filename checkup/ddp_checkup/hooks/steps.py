"""Steps of the optimizers.

A `step` event is made before each step of an optimizer:

    label        place of the step; ranks' steps with one label are compared
    optimizer    number of the optimizer
    names        names and shapes of its parameters
    start        whether this is its first step
    gradients    checksums, one per parameter
    weights      checksums before the step, one per parameter
    sharded      whether a parameter is a DTensor; then there are no checksums
    synced       whether DDP or a collective has ever handled one of the parameters
    inputs       contents of the models' inputs since the last step, or of
                 gradients that the script is about to average
    loaded       contents of the DataLoader's last batch
    losses       losses since the last step
    loss_weight  weight of one target in them, or None
    passes       backward passes since the last step
    sums         pairs (sum of gradients that the script added up, this sum now)
    norm         (line, norm) of clipped gradients, or None
    random       states of the random number generators, at the first steps
    loops        loops over DataLoaders that have begun so far

`first step` holds the type of the device and PyTorch's seed. `dtensor` holds the
contents and the place of a parameter's shard. `weights`, which is made at the end,
holds the last weights of an optimizer.
"""

import torch
from torch.optim import optimizer as optimizers

from ddp_checkup.hooks import loops, modules
from ddp_checkup.hooks.checksums import (
    checksums,
    contents,
    is_dtensor,
    random_states,
)
from ddp_checkup.hooks.wrapping import number_in, wrap
from ddp_checkup.trace import trace, user_line

MAX_COMPARED = 1000  # steps that have an event
MAX_RANDOM = 6  # steps whose generators are compared


class StopAfterSteps(BaseException):
    """Raised when the script has made the steps that --steps allows."""


def reset():
    global depth, seen, names, lists, synced, summed, sums, norm, latest
    depth = 0  # optimizers whose step() runs, one within another
    seen = []  # optimizers
    names, lists = {}, {}  # names by parameter id; their lists by optimizer
    synced = set()  # ids and places of tensors that DDP or a collective handled
    # Since the last step: absolute sums of gradients that the script added up over
    # the ranks, and pairs (that sum, the sum before clipping or the step)
    summed, sums = [], []
    norm = None  # (line, norm) of clipped gradients since the last step
    latest = []  # the parameters of the last step


def parameters_of(optimizer):
    return [p for group in optimizer.param_groups for p in group["params"]]


def names_of(number, parameters):
    """Return the names and shapes of an optimizer's parameters."""
    known = lists.get(number, [])
    if len(known) != len(parameters):
        named = [
            (names.get(id(p), "an unnamed parameter"), (*p.shape,))
            for p in parameters
        ]
        known = lists[number] = [f"{name} {shape}" for name, shape in named]
    return known


def parameter_sizes():
    """Return the numbers of elements of the parameters, one by one and in all."""
    sizes = [p.numel() for p in latest]
    return {*sizes, sum(sizes)} - {0, 1}


def place_of(tensor):
    """Return where a tensor's elements lie, and how many there are."""
    return tensor.untyped_storage().data_ptr(), tensor.numel()


def is_synced(parameter):
    places = {id(parameter), place_of(parameter)}
    if parameter.grad is not None and not parameter.grad.is_sparse:
        places.add(place_of(parameter.grad))
    return not synced.isdisjoint(places)


def before_step(optimizer, args, kwargs):
    global depth, norm, sums, latest
    depth += 1
    if depth > 1:  # within the step() of another optimizer
        return
    parameters = parameters_of(optimizer)
    sharded = any(map(is_dtensor, parameters))
    start = not any(optimizer is other for other in seen)
    number = number_in(seen, optimizer)
    device = parameters[0].device if parameters else torch.device("cpu")
    if not trace.of("step"):
        note_first_step(device, parameters)
    modules.optimized.update(map(id, parameters))
    loops.leave_evaluation()
    loop, line = trace.loop, user_line()
    label = loops.next_label(line)
    compared = [] if sharded else parameters
    if compared:
        note_division(compared)
    if trace.step < MAX_COMPARED:
        trace.add(
            "step",
            line=line,
            label=label,
            optimizer=number,
            start=start,
            names=names_of(number, parameters),
            gradients=checksums([p.grad for p in compared], device),
            weights=checksums(compared, device),
            inputs=trace.inputs,
            loaded=loop.latest if loop else None,
            losses=trace.losses,
            loss_weight=trace.loss_weight,
            passes=trace.passes,
            sharded=sharded,
            synced=any(map(is_synced, compared)),
            sums=sums,
            norm=norm,
            random=random_states(device) if trace.step < MAX_RANDOM else None,
            loops=len(trace.of("loop")),
        )
    latest, norm, sums = compared, None, []
    trace.inputs, trace.losses, trace.passes, trace.loss_weight = [], [], 0, None
    if loop:
        loop.latest = None
        loop.steps += 1


def note_first_step(device, parameters):
    modules.note_first(parameters)
    trace.add("first step", device=device.type, seed=torch.initial_seed())
    for number, parameter in enumerate(parameters, start=1):
        if is_dtensor(parameter):
            note_shard(number, parameter)


def note_shard(number, parameter):
    """Note the contents of a DTensor: shards differ, and replicas are equal."""
    places = parameter.device_mesh.get_coordinate()
    pairs = zip(parameter.placements, places, strict=True)
    # Ranks with the same shard, in one mesh or in another, are replicas.
    place = [c for placement, c in pairs if not placement.is_replicate()]
    found = contents(parameter.to_local())
    line = user_line()
    trace.add("dtensor", line=line, parameter=number, place=place, contents=found)


def after_step(optimizer, args, kwargs):
    global depth
    depth -= 1
    if depth:
        return
    trace.step, trace.activity = trace.step + 1, trace.activity + 1
    if trace.loop is None:
        trace.batches += 1
    if trace.step == trace.max_steps:
        raise StopAfterSteps


def note_division(parameters):
    """Note the sum that gradients had when the script added them up, and have now.

    If the script clips them, the sum now is the one before clipping.
    """
    if summed and parameters:
        gradients = [p.grad for p in parameters if p.grad is not None]
        now = sum(g.abs().sum() for g in gradients if not g.is_sparse)
        sums.append((sum(summed), now))
    summed.clear()


def note_norm(value):
    """Note the norm by which a rank clips its gradients, unless it is of a shard."""
    global norm
    if is_dtensor(value):
        if not all(placement.is_replicate() for placement in value.placements):
            return
        value = value.to_local()
    norm = norm or (user_line(), value.detach().clone())


def before_clip(name, values):
    note_division(latest)  # the parameters in values may be a generator


def finish(can_read):
    """Note the last weights; can_read: False if a device may wait for ever."""
    for number, optimizer in enumerate(seen):
        parameters = parameters_of(optimizer)
        if can_read and parameters and not any(map(is_dtensor, parameters)):
            trace.add("weights", optimizer=number, weights=checksums(parameters))


def install():
    utils = torch.nn.utils
    wrap(utils, "clip_grad_norm_", before_clip, lambda norm, _: note_norm(norm))
    wrap(utils, "clip_grads_with_norm_", before=lambda _, args: note_norm(args[2]))
    optimizers.register_optimizer_step_pre_hook(before_step)
    optimizers.register_optimizer_step_post_hook(after_step)
