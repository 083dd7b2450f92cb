"""Checks of weights and gradients: the ranks train copies of one model."""

from itertools import combinations, zip_longest
from math import isclose, isfinite

from ddp_checkup.checks.common import (
    differing,
    first_step,
    need_replicas,
    steps_of_all,
)
from ddp_checkup.checks.findings import Finding, NotSeen, check, worst

MUCH = 0.1  # relative difference between the ranks' weights of a target


def divergences(traces):
    """Yield (part, finding) for the first difference of each optimizer's model.

    part: "start", "gradients" or "weights". A model that was never wrapped,
    broadcast or reduced, while another one was, may differ by rank on purpose.
    """
    need_replicas(traces)
    steps = steps_of_all(traces)
    some_synced = any(step.synced for step in traces[0].of("step"))
    for number in dict.fromkeys(step.optimizer for step, *_ in steps):
        own = [of_all for of_all in steps if of_all[0].optimizer == number]
        found = first_difference(traces, own)
        if found:
            if are_averaged_later(traces, own):
                raise NotSeen("the ranks average their weights now and then")
            part, line, text = found
            apart = some_synced and not any(of_all[0].synced for of_all in own)
            yield part, Finding(line, text, "warning" if apart else None)


def first_difference(traces, steps):
    """Return (part, line, text) of the first difference, or None.

    steps: the steps of one optimizer. If the weights after a step are the same,
    step() itself averages, as ZeRO does, and gradients may differ before it.
    """
    first = steps[0]
    text = differing([step.weights for step in first], first[0].names)
    if text and first[0].start:
        return "start", first[0].line, f"before step 1, {text}"
    numbers = [step.optimizer for step in steps[-1]]
    ends = [
        [e for e in trace.of("weights") if e.optimizer == number]
        for trace, number in zip(traces, numbers, strict=True)
    ]
    # Where a rank failed, the others may be at another step.
    done = all(trace.finished for trace in traces)
    after = [*steps[1:], *(zip(*ends, strict=False) if done else ())]
    for of_all, of_next in zip_longest(steps, after):
        names, line = of_all[0].names, of_all[0].line
        when = f"since step {of_all[0].step + 1}"
        text = differing([step.gradients for step in of_all], names)
        later = of_next and differing([step.weights for step in of_next], names)
        if text and later != "":
            return "gradients", line, f"{when}, the gradients of {text}"
        if later:
            return "weights", line, f"{when}, {later}"
    return None


def are_averaged_later(traces, steps):
    """Return whether weights that differed become equal again, as in LocalSGD.

    Only collectives count, since loading a checkpoint on all ranks is no average.
    """
    differed = None
    for of_all in steps:
        if differing([step.weights for step in of_all], []):
            differed = differed or of_all[0]
        elif differed:
            collectives = traces[0].of("collective")
            times = range(differed.time, of_all[0].time)
            moved = sum(e.large for e in collectives if e.time in times)
            return moved > 0
    return False


def first_of(traces, part):
    """Return the finding of this part; raise NotSeen if another part has one."""
    found = [*divergences(traces)]
    findings = [finding for name, finding in found if name == part]
    if found and not findings:
        raise NotSeen(f"see {found[0][0]}")
    return worst(findings)


@check(
    "start",
    "all ranks start from the same weights",
    fix="Wrap the model in DistributedDataParallel after its weights are set: it "
    "broadcasts rank 0's. Load a checkpoint on all ranks.",
)
def start(traces):
    """checksums of the parameters before the first step"""
    return first_of(traces, "start")


@check(
    "gradients",
    "gradients are averaged over the ranks",
    fix="Train by the wrapped model, wrap again after you unfreeze layers, and "
    "change gradients after backward() on all ranks alike.",
)
def gradients(traces):
    """checksums of the gradients at every step"""
    need_replicas(traces)
    if any(unused_names(trace) for trace in traces):
        raise NotSeen("see unused-parameters")
    step = first_step(traces[0])
    steps = [step for trace in traces for step in trace.of("step")]
    if not any(value for step in steps for value in step.gradients):
        text = "every gradient is missing or zero in all steps; "
        text += f"the optimizer has {len(step.names)} parameters"
        text += "".join(f", first {name}" for name in step.names[:1])
        fix = "Give the optimizer the parameters that the loss uses. The loss must "
        fix += "depend on them: cross_entropy() over one class is always 0."
        return Finding(step.line, text, fix=fix)
    finding = first_of(traces, "gradients")
    if finding:
        return finding
    for of_all in steps_of_all(traces):
        passes = [step.passes for step in of_all]
        if len({*passes}) > 1:
            numbers = ", ".join(f"rank {r}: {n}" for r, n in enumerate(passes))
            text = f"step {of_all[0].step + 1} follows different numbers of"
            return Finding(of_all[0].line, f"{text} backward passes ({numbers})")
    called = {event.model for event in traces[0].of("forward")}
    for event in traces[0].of("wrap"):
        if event.model not in called:
            text = "the DDP model that is made here is never called"
            return Finding(event.line, text, "warning")
    return undivided(traces)


def undivided(traces):
    """Return a warning if gradients that are means are added up, and not divided."""
    steps = [step for trace in traces for step in trace.of("step")]
    pairs = [pair for step in steps for pair in step.sums]
    summed = all(isclose(a, b, rel_tol=1e-4) for a, b in pairs)
    if len(pairs) <= 2 * len(traces) or not summed:
        return None
    passes = [event for trace in traces for event in trace.of("backward")]
    if not all(event.plain_mean for event in passes):
        raise NotSeen("the gradients are summed, and the loss may be divided")
    text = "the gradients are the sum over the ranks, each of a mean over its batch"
    fix = "Divide them by the world size, or use ReduceOp.AVG."
    return Finding(first_step(traces[0]).line, text, "warning", fix)


@check(
    "weights",
    "all ranks have the same weights after each step",
    fix="Give the optimizers of all ranks the same options and the same state. If "
    "step() averages over the ranks, all must end it with the same weights.",
)
def weights(traces):
    """checksums of the parameters after every step"""
    return first_of(traces, "weights")


@check(
    "finite",
    "the losses of all ranks are finite",
    fix="Look at that rank's batch in this step. Skip such a batch on all ranks, "
    "after an all_reduce() of a flag: averaging spreads it to every rank's weights.",
)
def finite(traces):
    """the loss of every backward pass, before the gradients are averaged"""
    steps = steps_of_all(traces)
    if not any(step.losses for step, *_ in steps):
        raise NotSeen("no loss was seen")
    bad = [
        [not all(map(isfinite, step.losses)) for step in of_all] for of_all in steps
    ]
    for i, of_all in enumerate(bad):
        if any(of_all):
            ranks = [rank for rank, is_bad in enumerate(of_all) if is_bad]
            # A GradScaler skips such a step, and training goes on.
            spreads = i + 1 == len(bad) or all(bad[i + 1])
            if len(ranks) == len(traces) or not spreads:
                return None
            step = steps[i][ranks[0]]
            value = next(loss for loss in step.losses if not isfinite(loss))
            text = f"the loss of rank {ranks[0]} is {value} in step {step.step + 1}"
            return Finding(step.line, f"{text}, and then that of all ranks")
    return None


@check(
    "shards",
    "the shards of a parameter differ",
    fix="Draw shards with seed + rank, and what all ranks have with one seed.",
)
def shards(traces):
    """checksums of DTensors' shards before the first step"""
    shards_of_all = [
        {e.parameter: e for e in trace.of("dtensor")} for trace in traces
    ]
    if not any(shards_of_all):
        raise NotSeen("no DTensor was trained")
    if any(trace.of("drawn alike") for trace in traces):
        raise NotSeen("on CPUs all ranks draw the same DTensors")
    for (a, mine), (b, others) in combinations(enumerate(shards_of_all), 2):
        for number in mine.keys() & others.keys():
            one, two = mine[number], others[number]
            equal = one.contents == two.contents and any(c for _, c in one.contents)
            if one.place != two.place and equal:
                text = f"before step 1, ranks {a} and {b} have equal shards"
                return Finding(one.line, f"{text} of parameter {number}")
    return None


@check(
    "clipping",
    "all ranks clip by the same norm",
    fix="Clip by the norm of all gradients, after they were averaged. If a rank has "
    "a part of them, sum the squares with dist.all_reduce(), then call "
    "clip_grads_with_norm_().",
)
def clipping(traces):
    """the norms of clip_grad_norm_() and clip_grads_with_norm_()"""
    steps = [
        of_all for of_all in steps_of_all(traces) if all(e.norm for e in of_all)
    ]
    if not steps:
        raise NotSeen("no gradient was clipped")
    for of_all in steps:
        same_model = all(step.names == of_all[0].names for step in of_all)
        if same_model and differing([step.gradients for step in of_all], []):
            raise NotSeen("see gradients")
        norms = [step.norm[1] for step in of_all]
        finite_norms = [norm for norm in norms if isfinite(norm)]
        apart = 0 < len(finite_norms) < len(norms) or any(
            not isclose(norm, finite_norms[0], rel_tol=1e-3) for norm in finite_norms
        )
        if apart:
            texts = ", ".join(
                f"rank {r}: {norm:.4g}" for r, norm in enumerate(norms)
            )
            return Finding(
                of_all[0].norm[0], f"the ranks clip by other norms ({texts})"
            )
    return None


@check(
    "loss-count",
    "a mean loss weights the targets of all ranks alike",
    fix="Add up the counts of all ranks by dist.all_reduce(); divide each rank's "
    "sum by that total, times the world size, which DDP divides by.",
    level="warning",
)
def loss_count(traces):
    """the numbers by which a loss was divided, in its graph of autograd"""
    steps = [
        of_all
        for of_all in steps_of_all(traces)
        if all(e.loss_weight for e in of_all)
    ]
    if len(steps) < 3:
        raise NotSeen("no loss of a DDP model was divided by a count")
    apart = []
    for of_all in steps:
        weights = [step.loss_weight for step in of_all]
        if max(weights) > (1 + MUCH) * min(weights) > 0:
            apart.append((of_all[0].line, weights))
    if 2 * len(apart) < len(steps):
        return None
    line, weights = apart[0]
    ratios = ", ".join(f"{weight / max(weights):.2f}" for weight in weights)
    text = "each rank divides its loss by its own count, and DDP averages these"
    return Finding(line, f"{text} means: a target counts {ratios} on the ranks")


@check(
    "checkpoint",
    "a checkpoint's weights reach the model",
    fix="Save ddp_model.module.state_dict(); load it before DDP wraps the model.",
)
def checkpoint(traces):
    """the names that load_state_dict(strict=False) did not find"""
    loaded = [event for trace in traces for event in trace.of("loaded")]
    if not loaded:
        raise NotSeen("no state was loaded")
    for event in loaded:
        if event.missing:
            names = f"{len(event.missing)} tensors, first {event.missing[0]},"
            text = (
                f"{names} keep what they had: their names begin with `module.` in "
            )
            return Finding(event.line, f"{text}the checkpoint or in the model alone")
    return None


def unused_names(trace):
    """Return the parameters that DDP missed when this rank failed."""
    return [name for event in trace.of("failure") for name in event.unused]


@check(
    "unused-parameters",
    "each backward pass reaches all parameters",
    fix="Use all parameters in each forward pass, freeze those that are never used "
    "before DDP wraps the model, or set find_unused_parameters=True.",
)
def unused_parameters(traces):
    """DDP's error in the next forward pass"""
    if not any(trace.of("wrap") for trace in traces):
        raise NotSeen("no DDP model was trained")
    for rank, trace in enumerate(traces):
        names = unused_names(trace)
        if names:
            line = [e.line for e in trace.of("forward") if e.training][-1]
            text = f"rank {rank} had no gradient for {', '.join(names)}"
            return Finding(line, text)
    return None
