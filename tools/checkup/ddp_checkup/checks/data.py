"""Checks of the data: each sample counts once, and random numbers differ."""

from itertools import combinations

from ddp_checkup.checks.loops import count, loops
from ddp_checkup.checks.ranks import (
    average_before_step,
    communicate_in_step,
    no_indices,
    no_own_batches,
)
from ddp_checkup.checks.verdicts import OK, check, found, unseen


@check(
    "each rank trains on different batches",
    seen="checksums of the batches and of the inputs to the wrapped model",
    fix="Give each rank its own data: a part by rank, or batches by seed + rank.",
)
def same_batch(ranks):
    if no_own_batches(ranks):
        return unseen(no_own_batches(ranks))
    by_index = coverage(ranks)
    if by_index.state != "not seen":
        return OK if by_index.state == "ok" else unseen("see coverage")
    by_gradient = same_gradients(ranks)
    if by_gradient:
        return found(by_gradient)
    inputs, why = same_tensors(ranks, "inputs", all)
    if inputs:
        return found(inputs)
    # Inputs may differ by augmentation, where labels do not; and days of different
    # years are alike.
    batches, _ = same_tensors(ranks, "batches", half)
    if batches and not slices(ranks):
        return found(batches)
    a_tensor, _ = same_tensors(ranks, "inputs", any)
    if a_tensor:
        text = a_tensor.replace("the same batch", "a tensor of the same contents")
        return found(text, "warning")
    return unseen("too few batches with contents") if why else OK


def same_tensors(ranks, part, how_many):
    """Say which ranks had the same tensors in all steps; or why that is not known.

    how_many: all, half or any of the tensors that differ from step to step.
    """
    found_by_rank = [getattr(r, part) for r in ranks]
    labels = [x for x in ranks[0].labels if all(x in f for f in found_by_rank)]
    steps = [[f[label] for label in labels] for f in found_by_rank]
    if len(labels) < 3:
        return "", "there are fewer than three"
    width = min(len(step) for rank in steps for step in rank)
    telling = []
    for j in range(width):
        shape = steps[0][0][j][0]
        values = {step[j][1] for step in steps[0] if step[j][0] == shape} - {0}
        if len(values) > 1:
            telling.append(j)
    if not telling:
        return "", "they do not change"
    for a, b in combinations(range(len(ranks)), 2):
        pairs = [*zip(steps[a], steps[b], strict=True)]
        if how_many(all(one[j] == two[j] for one, two in pairs) for j in telling):
            line = ranks[0].models[0][0]
            return f"{line}: ranks {a} and {b} had the same batch in all steps", ""
    return "", ""


def half(values):
    values = [*values]
    return 2 * sum(values) >= len(values)


def same_gradients(ranks):
    """Say which ranks had the same gradients before the steps that average them."""
    if average_before_step(ranks) or not communicate_in_step(ranks):
        return ""
    steps = [r.gradients for r in ranks]
    if len(steps[0]) < 3 or len({*map(tuple, steps[0])}) == 1:
        return ""
    for a, b in combinations(range(len(ranks)), 2):
        if steps[a] == steps[b]:
            line = ranks[0].models[0][0]
            text = f"ranks {a} and {b} had the same gradients before all steps"
            return f"{line}: {text}, and so the same batches"
    return ""


def slices(ranks):
    """Return whether the ranks load one batch, and each trains on a part of it."""
    for label in ranks[0].labels:
        batches = [r.batches.get(label) for r in ranks]
        inputs = [r.inputs.get(label) for r in ranks]
        if all(batches) and all(inputs) and all(b == batches[0] for b in batches):
            (shape, _), *_ = batches[0]
            parts = [part for its in inputs for part, _ in its]
            if any(is_cut(shape, parts, dim) for dim in range(len(shape))):
                return True
    return False


def is_cut(shape, parts, dim):
    """Return whether a tensor was cut along this dimension, and all is used."""
    rest = shape[:dim], shape[dim + 1 :]
    lengths = [p[dim] for p in parts if (p[:dim], p[dim + 1 :]) == rest]
    return sum(lengths) == shape[dim] > max(lengths, default=0)


@check(
    "each sample is trained on by one rank, and none is left out",
    seen="the indices that the loaders dealt out in an epoch; where there are none, "
    "checksums of the samples",
    fix="Use DistributedSampler(dataset), with the global rank, and not local_rank.",
)
def coverage(ranks):
    if no_own_batches(ranks):
        return unseen(no_own_batches(ranks))
    if not any(r.loaders for r in ranks):
        return unseen("no DataLoader was used")
    if slices(ranks):
        return unseen("the ranks take a part of each batch")
    why, undecided = "no DataLoader with indices was used", ""
    bad = mild = None
    one_seed = "Draw the order with one seed on all ranks; then take a part."
    shared_out = set()  # lines of loaders that dealt out one epoch well
    for line, number, group, items in loops(ranks, True):
        first, why = group[0], ""
        alike = all(e.sample == first.sample for e in group)
        known = first.shards or len(first.sets) > 1 or (first.sample and alike)
        batch = first.batch * len(ranks)
        twice = any(len(e.items) - len({*e.items}) >= batch for e in group)
        if items is None or not known:
            undecided = "each rank may have its own data set"
        elif first.replaces or twice:
            undecided = "samples are drawn with replacement"
        else:
            again, missing = count(group, items)
            text = f"{again} are repeated, {missing} left out"
            text = f"{line}, epoch {number}: of {len(items)} samples {text}"
            whole = all(e.whole for e in group) and len(group) == len(ranks)
            # The last global batch may be filled up, or dropped.
            may_miss = batch * first.drops if whole else len(items)
            may_repeat = batch if first.drops or not first.shards else len(ranks)
            differ = len({frozenset(e.items) for e in group}) == len(group)
            # An index may mean another sample on each rank, as in YOLOv5.
            own = not (first.sample and alike)
            if again < min(may_repeat, len(items)) and missing <= may_miss:
                shared_out.add(line)
            elif first.chooses and (differ or own) and line not in shared_out:
                undecided = "the script's own sampler chooses the samples"
                if not own and again > batch and shares_out(group, items, batch):
                    mild = mild or found(text, "warning", one_seed)
            else:
                bad = bad or found(text, fix=one_seed if first.chooses else None)
    if bad or mild:
        return bad or mild
    if not why and not undecided:
        return OK
    if split(ranks).state == "found":
        return unseen("see split")
    text = samples_of_two(ranks)
    fix = (
        "Give each rank, and each of its loader's workers, another part of the data."
    )
    return found(text, "warning", fix) if text else unseen(why or undecided)


def shares_out(group, items, batch):
    """Return whether the ranks' parts have the size of the data, and no repeats.

    Then they are meant to make up an epoch. batch: the global one, by which it may
    be filled up or cut.
    """
    sizes = [len(e.items) for e in group]
    once = all(len({*e.items}) == len(e.items) for e in group)
    return once and abs(sum(sizes) - len(items)) < max(batch, len(group))


def samples_of_two(ranks):
    """Say which two ranks had many of the same samples, however they were dealt out.

    Only tensors tell whose samples a rank itself seldom has twice: labels do not.
    """
    if any(
        same_tensors(ranks, *how)[0] for how in (("inputs", all), ("batches", half))
    ):
        return ""  # same-batch says it
    for a, b in combinations(ranks, 2):
        for loop in a.samples.keys() & b.samples.keys():
            line, mine = a.samples[loop]
            _, others = b.samples[loop]
            for number in mine.keys() & others.keys():
                one, two = (
                    [s for batch in its[number] for s in batch]
                    for its in (mine, others)
                )
                both = len({*one} & {*two})
                seldom = min(len({*one}) / len(one), len({*two}) / len(two)) > 0.95
                fills_up = len(mine[number][0])
                if seldom and both > max(fills_up, 0.2 * len(one)):
                    text = f"{both} of {len(one)} samples of rank {a.rank} are also"
                    return f"{line}: {text} rank {b.rank}'s"
    return ""


@check(
    "each epoch has a new order",
    seen="the indices that the loader dealt out, from epoch to epoch",
    fix="Call sampler.set_epoch(epoch) before each epoch.",
)
def set_epoch(ranks):
    before, why = {}, no_indices(ranks) or "there was one epoch"
    undecided = ""
    for line, number, group, _ in loops(ranks, True):
        now, last = group[0].order, before.get(line, [])
        before[line], shown = now, min(len(now), len(last))
        if shown >= 8:  # a few may be alike by chance
            if now == sorted(now):
                undecided = "the loader does not shuffle"
            elif now[:shown] == last[:shown]:
                text = f"epoch {number} has the order of epoch {number - 1}"
                return found(f"{line}: {text}")
            else:
                why = ""
    why = undecided or why
    return unseen(why) if why else OK


@check(
    "all ranks split the data alike",
    seen="length and items of the data set, and the indices of subsets",
    fix="Split with a torch.Generator that has the same seed on all ranks.",
)
def split(ranks):
    cut = "" if all(r.done for r in ranks) else "the script did not come to its end"
    why = no_indices(ranks) or cut or "the items cannot be compared"
    undecided = ""
    for line, number, group, items in loops(ranks, True):
        if items is None:
            text = f"{line}: the ranks' subsets overlap, and are not the same"
            if not group[0].shards:
                text += ", and no DistributedSampler deals them out"
            return found(f"{text}. Check again after the fix: more may follow")
        first, shared_out = group[0], is_shared_out(group)
        for name, value in first.lists.items():
            differ = any(e.lists.get(name, value) != value for e in group)
            if shared_out and differ:
                return found(f"{line}: the ranks' data sets differ in {name}")
        if number == 1 and first.shards and len(group) < len(ranks):
            return found(f"{line}: the ranks' data sets have different lengths")
        all_here = len(group) == len(ranks) and not cut
        if number == 1 and first.sample and all_here:
            same = all(e.sample == first.sample for e in group)
            if shared_out and not same:
                text = "the same index gives different items on the ranks"
                return found(f"{line}: {text}")
            alike = all(e.collated == first.collated for e in group)
            if same and first.collated and not alike:
                text = "collate_fn makes other batches of the same items"
                return found(f"{line}: {text}")
            if not same:
                undecided = "each rank has its own data set"
            why = ""
    why = why or undecided
    return unseen(why) if why else OK


def is_shared_out(group):
    """Return whether a sampler gives each rank other indices of one data set."""
    parts = [{*e.items} for e in group]
    union = set().union(*parts)
    repeated = sum(map(len, parts)) - len(union)
    apart = repeated < min(len(group) * group[0].batch, *map(len, parts))
    most = 2 * len(union) >= len(group[0].sets[-1])  # no few that chance keeps apart
    return group[0].shards or (len(group) > 1 and apart and most)


@check(
    "all ranks number words and classes alike",
    seen="the dicts that number strings, and the lists of words or classes, in the "
    "script's variables at the first step",
    fix="Build it from all the data, sorted, on each rank, or send rank 0's by "
    "dist.broadcast_object_list().",
)
def numbering(ranks):
    for name, mine in ranks[0].numberings.items():
        for r in ranks[1:]:
            others = r.numberings.get(name, {})
            # Words of one rank alone may be those of its part of the data.
            for word in mine.keys() & others.keys():
                if mine[word] != others[word]:
                    text = f"{name}: {word!r} is {mine[word]} on rank 0 and "
                    return found(f"{text}{others[word]} on rank {r.rank}")
    none = "no variable numbers words or classes"
    return OK if any(r.numberings for r in ranks) else unseen(none)
