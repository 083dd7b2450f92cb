"""Checks of weights and gradients: the ranks train one model."""

from itertools import combinations
from math import isclose

from ddp_checkup.checks.ranks import (
    average_before_step,
    communicate_in_step,
    no_replicas,
    no_steps,
)
from ddp_checkup.checks.verdicts import OK, check, found, unseen


def steps_of_all(ranks, part):
    """Yield (step, values on all ranks) for the steps that all ranks have made."""
    steps = [dict(zip(r.labels, getattr(r, part), strict=False)) for r in ranks]
    for i, label in enumerate(ranks[0].labels):
        if all(label in its for its in steps):
            yield i, [its[label] for its in steps]


def count_differing(of_all, names, what="parameters"):
    """Say how many tensors differ between ranks, if any do; what: their name."""
    bad = [j for j, v in enumerate(zip(*of_all, strict=False)) if len({*v}) > 1]
    if not bad:
        return ""
    first = f", first {names[bad[0]]}" if bad[0] < len(names) else ""
    return f"{len(bad)} of {len(of_all[0])} {what} differ between ranks{first}"


def first_difference(ranks, part):
    """Say where and since when a part of the ranks' steps differs, if it does."""
    models, whose = ranks[0].models, "the gradients of " * (part == "gradients")
    for i, of_all in steps_of_all(ranks, part):
        names = models[min(i, len(models) - 1)][1]
        differing = count_differing(of_all, names)
        if differing:
            steps = [i]
            if part == "weights":  # they are those before this step of an optimizer
                steps = [j for j in range(i) if models[j][1] == names] or [
                    max(i, 1) - 1
                ]
            line, step = models[steps[-1]][0], steps[-1] + 1
            return f"{line}, since step {step}: {whose}{differing}"
    return ""


def are_averaged_later(ranks):
    """Return whether weights that differed become equal again, as in LocalSGD.

    Collectives make them so. All ranks may also load one checkpoint, which is no
    average.
    """
    differed = {}  # of several optimizers each has its own weights: the first step
    for i, of_all in steps_of_all(ranks, "weights"):
        model = str([*ranks[0].models[i:], ranks[0].models[-1]][0])
        if any(v != of_all[0] for v in of_all):
            differed.setdefault(model, i)
        elif model in differed:
            steps = range(differed[model], i + 1)
            moved = sum(ranks[0].moved[step] for step in steps)
            return 2 * moved >= ranks[0].elements
    return False


@check(
    "all ranks start from the same weights",
    seen="checksums of the parameters before the first step",
    fix="Wrap the model in DistributedDataParallel: it broadcasts rank 0's weights.",
)
def start(ranks):
    if no_replicas(ranks):
        return unseen(no_replicas(ranks))
    if no_gradient(ranks):
        return unseen("see gradients")
    line, names = ranks[0].models[0]
    differing = count_differing([r.start[0] for r in ranks], names)
    return found(f"{line}, before step 1: {differing}") if differing else OK


@check(
    "the shards of a parameter differ",
    seen="checksums of DTensors' shards before the first step",
    fix="Draw shards with seed + rank, and what all ranks have with one seed.",
)
def shards(ranks):
    if not any(r.shards for r in ranks):
        return unseen(no_steps(ranks) or "no DTensor was trained")
    if any(r.drawn_alike for r in ranks):
        return unseen("on CPUs all ranks draw the same DTensors")
    for a, b in combinations(ranks, 2):
        for number, (place, *tensor) in a.shards.items():
            other_place, *other = b.shards.get(number, [place])
            if place != other_place and tensor == other and tensor[1]:
                text = f"ranks {a.rank} and {b.rank} have equal shards"
                line = f"{a.models[0][0]}, before step 1"
                return found(f"{line}: {text} of parameter {number}")
    return OK


def no_gradient(ranks):
    return not any(value for r in ranks for step in r.gradients for value in step)


def other_scales(ranks):
    """Say at which scales the ranks' GradScalers came to differ, if they did."""
    for label in ranks[0].scales:
        scales = [r.scales[label] for r in ranks if label in r.scales]
        if min(scales) != max(scales):
            texts = ", ".join(f"{scale:g}" for scale in scales)
            return f"; the ranks' GradScalers have the scales {texts}"
    return ""


def scaler_fix(ranks):
    if not other_scales(ranks):
        return None
    return (
        "Give the GradScalers of all ranks the same state, and skip a step on all "
        "ranks or on none. If the scales differ because the gradients do, train by "
        "the wrapped model."
    )


@check(
    "gradients are averaged over the ranks",
    seen="checksums of the gradients at each step",
    fix="Train by the wrapped model, wrap again after you unfreeze layers, and "
    "change gradients after backward() on all ranks alike.",
)
def gradients(ranks):
    if no_replicas(ranks):
        return unseen(no_replicas(ranks))
    if any(r.unused for r in ranks):
        return unseen("see unused-parameters")
    if no_gradient(ranks):
        line, names = ranks[0].models[0]
        text = f"no gradient in any step; the optimizer has {len(names)} parameters"
        first = f", first {names[0]}" if names else ""
        return found(f"{line}: {text}{first}")
    where = first_difference(ranks, "gradients")
    if communicate_in_step(ranks) and (where or not average_before_step(ranks)):
        return unseen("the optimizer's step() averages them; see weights")
    if where and are_averaged_later(ranks):
        return unseen("the ranks average their weights now and then")
    if where:
        return found(where + other_scales(ranks), fix=scaler_fix(ranks))
    for i, passes in steps_of_all(ranks, "passes"):
        if len({*passes}) > 1:
            numbers = ", ".join(f"rank {r}: {n}" for r, n in enumerate(passes))
            text = f"step {i + 1} has different numbers of backward passes"
            return found(f"{ranks[0].models[i][0]}: {text} ({numbers})")
    for line in ranks[0].uncalled.values():
        text = "the DDP model that is made here is never called"
        return found(f"{line}: {text}", "warning")
    pairs = [pair for r in ranks for pair in r.undivided]
    same = all(isclose(a, b, rel_tol=1e-4) for a, b in pairs)
    summed = same and len(pairs) > 2 * len(ranks)
    if summed and not any(r.scaled or r.unused is not None for r in ranks):
        text = (
            "the gradients are the sum over the ranks, each of a mean over its batch"
        )
        fix = "Divide them by the world size, or use ReduceOp.AVG."
        return found(f"{ranks[0].models[0][0]}: {text}", "warning", fix)
    return OK


@check(
    "a checkpoint's weights reach the model",
    seen="the names that load_state_dict(strict=False) did not find",
    fix="Save ddp_model.module.state_dict(); load it before DDP wraps the model.",
)
def checkpoint(ranks):
    if any(r.not_loaded for r in ranks):
        line, names = next(r.not_loaded for r in ranks if r.not_loaded)
        text = f"{len(names)} tensors, first {names[0]}, keep what they had: in the"
        text += " checkpoint `module.` stands before their names, or in the model"
        return found(f"{line}: {text}")
    return OK if any(r.loads for r in ranks) else unseen("no state was loaded")


@check(
    "each backward pass reaches all parameters",
    seen="DDP's error in the next forward pass",
    fix="Use all parameters in each forward pass, freeze those that are never used "
    "before DDP wraps the model, or set find_unused_parameters=True.",
)
def unused_parameters(ranks):
    if all(r.unused is None for r in ranks):
        return unseen("no DDP model was trained")
    texts = [r.unused for r in ranks if r.unused]
    return found(texts[0]) if texts else OK


@check(
    "all ranks have the same weights after each step",
    seen="checksums of the parameters after each step",
    fix="Give the optimizers of all ranks the same options and the same state. If "
    "step() averages over the ranks, all must end it with the same weights.",
)
def weights(ranks):
    if no_replicas(ranks):
        return unseen(no_replicas(ranks))
    averaged = gradients(ranks).state == "ok" or communicate_in_step(ranks)
    if start(ranks).state == "found" or not averaged:
        return unseen("see start or gradients")
    where = first_difference(ranks, "weights")
    if where and are_averaged_later(ranks):
        return unseen("the ranks average their weights now and then")
    return found(where) if where else OK


@check(
    "all ranks clip by the same norm",
    seen="the norms of clip_grad_norm_() and clip_grads_with_norm_()",
    fix="Clip by the norm of all gradients, after they were averaged. If a rank has "
    "a part of them, sum the squares with dist.all_reduce(), then call "
    "clip_grads_with_norm_().",
)
def clipping(ranks):
    if not any(r.clips for r in ranks):
        return unseen(no_steps(ranks) or "no gradient was clipped")
    if not no_replicas(ranks) and gradients(ranks).state != "ok":
        return unseen("see gradients")
    for label in ranks[0].clips:
        clips = [r.clips[label] for r in ranks if label in r.clips]
        norms = [norm for _, norm in clips]
        if max(norms) - min(norms) > 1e-3 * max(norms):
            texts = " and ".join(f"{norm:.4g}" for norm in norms[:2])
            return found(f"{clips[0][0]}: ranks 0 and 1 clip by the norms {texts}")
    return OK


@check(
    "the learning rate's schedule ends with the training",
    seen="the steps that a scheduler was made for, and those that it made",
    fix="Count the steps of a rank: len(loader) of its own part, times the epochs.",
    level="warning",
)
def schedule(ranks):
    most = {}  # one of several may have been interrupted, to resume in the next
    for line, name, planned, made in ranks[0].schedules:
        most[line, name, planned] = max(made, most.get((line, name, planned), 0))
    for (line, name, planned), made in most.items():
        # About that of one process: other ends may be meant.
        if made >= 10 and abs(planned - made * len(ranks)) < 0.1 * planned:
            text = f"{name} was made for {planned} steps, and made {made}: it counts"
            return found(f"{line}: {text} the batches of all ranks")
        steps = ranks[0].steps
        as_planned = abs(planned - steps) < 0.1 * planned
        if steps >= 10 and as_planned and made == steps * len(ranks):
            text = f"{name} made {made} steps in {steps} of the optimizer"
            fix = "Call scheduler.step() once after each optimizer.step()."
            return found(f"{line}: {text}: one for each rank", fix=fix)
    return OK if ranks[0].schedules else unseen("no scheduler has a number of steps")


@check(
    "no_sync() covers the forward pass, too",
    seen="DDP's own switch, in forward and backward passes",
    fix="Put model(...) and backward() into `with ddp_model.no_sync():`, since DDP "
    "decides in the forward pass.",
    level="warning",
)
def no_sync(ranks):
    for line in (r.late_no_sync for r in ranks if r.late_no_sync):
        text = "DDP averages the gradients here, although this is within no_sync()"
        return found(f"{line}: {text}")
    return (
        OK if any(r.unused is not None for r in ranks) else unseen("no DDP was used")
    )
