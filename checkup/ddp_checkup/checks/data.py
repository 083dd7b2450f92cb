"""Checks of the data: every rank trains on its own part, and none is left out."""

from itertools import combinations, pairwise

from ddp_checkup.checks.common import (
    count_items,
    first_step,
    loops_of_all,
    need_own_batches,
    steps_of_all,
)
from ddp_checkup.checks.findings import Finding, NotSeen, check

OTHER_PART = "Give each rank, and each loader worker, another part of the data."
MIN_ORDER = 8  # indices: a shorter order may be the same by chance


@check(
    "same-batch",
    "each rank trains on different batches",
    fix="Give each rank its own data: a part by rank, or batches by seed + rank.",
)
def same_batch(traces):
    """checksums of the batches and of the inputs to the wrapped model"""
    need_own_batches(traces)
    if shares_are_known(traces):
        return None  # coverage compares the indices
    found = same_tensors(traces, "inputs", all)
    # Augmentation may change the inputs, but not the labels. Some tensors, such as
    # the days of different years, may be alike, so at least half have to be equal.
    found = found or same_tensors(traces, "loaded", half)
    if found and not takes_parts(traces):
        text = f"{found} the same batch in all steps"
        return Finding(first_step(traces[0]).line, text)
    found = same_tensors(traces, "inputs", any)
    if found:
        text = f"{found} a tensor of the same contents in all steps"
        return Finding(first_step(traces[0]).line, text, "warning")
    return None


def half(values):
    values = [*values]
    return 2 * sum(values) >= len(values)


def same_tensors(traces, part, how_many):
    """Return which ranks had the same tensors in all steps, or "".

    part: "inputs" or "loaded" of the steps. how_many: all, half or any of the
    tensors that differ from step to step.
    """
    steps = [[getattr(e, part) for e in of_all] for of_all in steps_of_all(traces)]
    steps = [of_all for of_all in steps if all(of_all)]
    if len(steps) < 3:
        return ""
    width = min(len(tensors) for of_all in steps for tensors in of_all)
    telling = []
    for j in range(width):
        shape, _ = steps[0][0][j]
        values = {of_all[0][j][1] for of_all in steps if of_all[0][j][0] == shape}
        if len(values - {0}) > 1:
            telling.append(j)
    for a, b in combinations(range(len(traces)), 2):
        same = [
            all(of_all[a][j] == of_all[b][j] for of_all in steps) for j in telling
        ]
        if same and how_many(same):
            return f"ranks {a} and {b} had"
    return ""


def takes_parts(traces):
    """Return whether the ranks load one batch, and each trains on a part of it."""
    for of_all in steps_of_all(traces):
        batches, inputs = [e.loaded for e in of_all], [e.inputs for e in of_all]
        if all(batches) and all(inputs) and all(b == batches[0] for b in batches):
            shape, _ = batches[0][0]
            parts = [part for its in inputs for part, _ in its]
            if any(is_cut(shape, parts, dim) for dim in range(len(shape))):
                return True
    return False


def is_cut(shape, parts, dim):
    """Return whether a tensor was cut along this dimension, and all is used."""
    rest = shape[:dim], shape[dim + 1 :]
    lengths = [p[dim] for p in parts if (p[:dim], p[dim + 1 :]) == rest]
    return sum(lengths) == shape[dim] > max(lengths, default=0)


class Shares:
    """How the ranks' loops over a loader share out an epoch, by their indices."""

    def __init__(self, traces, number, loops, items):
        first, self.loops, self.number, self.items = loops[0], loops, number, items
        self.same_data = all(e.sample == first.sample for e in loops)
        self.is_known = items is not None and bool(
            first.shards or len(first.sets) > 1 or (first.sample and self.same_data)
        )
        self.global_batch = first.batch_size * len(traces)
        self.is_whole = all(e.whole for e in loops) and len(loops) == len(traces)
        self.chooses = first.chooses  # whether the script wrote the sampler
        repeats = (len(e.items) - len({*e.items}) for e in loops)
        self.replaces = first.replaces or max(repeats) >= self.global_batch
        self.again, self.missing = count_items(loops, items) if items else (0, 0)
        # The last global batch may be filled up, or dropped.
        may_repeat = (
            self.global_batch if first.drops or not first.shards else len(traces)
        )
        may_miss = self.global_batch if first.drops else 0
        if not self.is_whole:
            may_miss = len(items or ())
        most = min(may_repeat, len(items or ()))
        self.is_good = self.again < most and self.missing <= may_miss

    def chooses_apart(self):
        """Return whether the script's sampler gives ranks other indices or data."""
        parts = {frozenset(e.items) for e in self.loops}
        first = self.loops[0]
        own = not (first.sample and self.same_data)
        return self.chooses and (len(parts) == len(self.loops) or own)

    def makes_an_epoch(self):
        """Return whether the parts have the size of the data, and repeat nothing."""
        once = all(len({*e.items}) == len(e.items) for e in self.loops)
        dealt = sum(len(e.items) for e in self.loops)
        most = max(self.global_batch, len(self.loops))
        return once and abs(dealt - len(self.items)) < most


def all_shares(traces):
    return [Shares(traces, *loops) for loops in loops_of_all(traces, True)]


def shares_are_known(traces):
    """Return whether the indices of all loops show which rank trains on what."""
    found = all_shares(traces)
    return bool(found) and all(s.is_known and not s.replaces for s in found)


@check(
    "coverage",
    "exactly one rank trains on each sample, and none is left out",
    fix="Use DistributedSampler(dataset), with the global rank, and not local_rank.",
)
def coverage(traces):
    """the indices that the loaders dealt out in an epoch, or checksums of samples"""
    need_own_batches(traces)
    if not any(trace.of("loop") for trace in traces):
        raise NotSeen("no DataLoader was used")
    if takes_parts(traces):
        raise NotSeen("the ranks take a part of each batch")
    why = "no DataLoader with indices was used"
    one_seed = "Draw the order with one seed on all ranks; then take a part."
    mild, good = None, set()  # good: lines of loaders that dealt out one epoch well
    for shares in all_shares(traces):
        line, why = shares.loops[0].line, ""
        text = f"epoch {shares.number}: of {len(shares.items or ())} samples "
        text += f"{shares.again} are repeated, {shares.missing} left out"
        if shares.items is None:
            raise NotSeen("the ranks' subsets overlap, and are not the same")
        if not shares.is_known:
            why = "each rank may have its own data set"
        elif shares.loops[0].sample and not shares.same_data and not shares.chooses:
            why = "see split"
        elif shares.replaces:
            why = "samples are drawn with replacement"
        elif shares.is_good:
            good.add(line)
        elif shares.chooses_apart() and line not in good:
            why = "the script's own sampler chooses the samples"
            too_many = shares.again > shares.global_batch and shares.makes_an_epoch()
            if too_many and shares.same_data:
                mild = mild or Finding(line, text, "warning", one_seed)
        else:
            return Finding(line, text, fix=one_seed if shares.chooses else None)
    if mild or not why:
        return mild
    found = samples_of_two(traces)
    if found is None:
        raise NotSeen(why)
    return found


def samples_of_two(traces):
    """Return a warning if two ranks had many of the same samples, however dealt out.

    Only tensors count whose samples seldom repeat on a rank, so labels do not.
    """
    if same_tensors(traces, "inputs", all) or same_tensors(traces, "loaded", half):
        return None  # same-batch reports it
    by_rank = [{(e.key, e.number): e for e in t.of("loop")} for t in traces]
    for (a, mine), (b, others) in combinations(enumerate(by_rank), 2):
        for key in mine.keys() & others.keys():
            loop, other = mine[key], others[key]
            for number in loop.samples.keys() & other.samples.keys():
                batches = loop.samples[number], other.samples[number]
                one, two = ([s for part in its for s in part] for its in batches)
                both = len({*one} & {*two})
                seldom = min(len({*one}) / len(one), len({*two}) / len(two)) > 0.95
                fills_up = len(loop.samples[number][0])
                if seldom and both > max(fills_up, 0.2 * len(one)):
                    text = f"{both} of {len(one)} samples of rank {a} are also those"
                    text += f" of rank {b}"
                    return Finding(loop.line, text, "warning", OTHER_PART)
    return None


@check(
    "set-epoch",
    "each epoch has a new order",
    fix="Call sampler.set_epoch(epoch) before each epoch.",
)
def set_epoch(traces):
    """the indices that a loader dealt out, from epoch to epoch"""
    first_step(traces[0])
    loops = [e for e in traces[0].of("loop") if e.has_items and e.trains]
    why = "there was one epoch"
    for loader in dict.fromkeys(e.loader for e in loops):
        own = [e for e in loops if e.loader == loader]
        for number, (before, after) in enumerate(pairwise(own), start=2):
            shown = min(len(before.order), len(after.order))
            if shown < MIN_ORDER:
                continue
            if after.order == sorted(after.order):
                why = "the loader does not shuffle"
            elif after.order[:shown] == before.order[:shown]:
                text = f"epoch {number} has the order of epoch {number - 1}"
                return Finding(after.line, text)
            else:
                why = ""
    if why:
        raise NotSeen(why)
    return None


@check(
    "split",
    "all ranks split the data alike",
    fix="Make and split the data with a torch.Generator that has the same seed on "
    "all ranks, or load one file. List files in sorted order.",
)
def split(traces):
    """length and items of the data set, and the indices of subsets"""
    first_step(traces[0])
    done = all(trace.finished for trace in traces)
    why = "no DataLoader with indices was used"
    for number, loops, items in loops_of_all(traces, True):
        first, why = loops[0], "" if done else "the script did not come to its end"
        if items is None:
            text = "the ranks' subsets overlap, and are not the same"
            if not first.shards:
                text += ", and no DistributedSampler deals them out"
            text += ". Check again after the fix: more may follow"
            return Finding(first.line, text)
        if number == 1 and first.shards and len(loops) < len(traces):
            return Finding(first.line, "the ranks' data sets have different lengths")
        for name, value in first.lists.items():
            differ = any(e.lists.get(name, value) != value for e in loops)
            if differ and is_shared_out(loops):
                return Finding(first.line, f"the ranks' data sets differ in {name}")
        if not (first.sample and len(loops) == len(traces) and done):
            why = why or "the items cannot be compared"
        elif any(e.sample != first.sample for e in loops):
            if is_shared_out(loops):
                text = "the same index gives different items on the ranks"
                return Finding(first.line, text)
            why = "each rank has its own data set"
        elif any(e.collated != first.collated for e in loops):
            text = "collate_fn makes other batches of the same items"
            return Finding(first.line, text)
    if why:
        raise NotSeen(why)
    return None


def is_shared_out(loops):
    """Return whether a sampler gives each rank other indices of one data set."""
    parts = [{*e.items} for e in loops]
    union = set().union(*parts)
    repeated = sum(map(len, parts)) - len(union)
    apart = repeated < min(len(loops) * loops[0].batch_size, *map(len, parts))
    # Parts that leave much out come from one file list per rank.
    most = 2 * len(union) >= len(loops[0].sets[-1])
    return loops[0].shards or (len(loops) > 1 and apart and most)
