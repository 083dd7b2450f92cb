"""Helpers of several checks: steps and loops that the ranks have in common."""

from collections import Counter
from itertools import zip_longest

from ddp_checkup.checks.findings import NotSeen


def first_step(trace):
    """Return the first step of a rank; raise NotSeen if there is none."""
    step = trace.first("step")
    if step is None:
        raise NotSeen("no optimizer step was made")
    return step


def have_parts(traces):
    """Return whether the ranks hold parts of one model, and so may share a batch."""
    if any(trace.of("parallel") for trace in traces):
        return True
    # Rank 0 may have trained another model alone before the first common step.
    names = [step.names for step in steps_of_all(traces)[0]]
    return any(other != names[0] for other in names)


def need_replicas(traces):
    """Raise NotSeen if the ranks do not train copies of one model, step by step."""
    if have_parts(traces):
        raise NotSeen("the ranks have different parameters")
    if any(trace.of("join") for trace in traces):
        raise NotSeen("with join(), ranks make different numbers of steps")
    if any(trace.of("shard") for trace in traces) or first_step(traces[0]).sharded:
        raise NotSeen("the parameters are sharded")
    if not all(first_step(trace).weights for trace in traces):
        raise NotSeen("a GPU that waits cannot be read")


def need_own_batches(traces):
    """Raise NotSeen if the ranks need no batches of their own."""
    if have_parts(traces):
        raise NotSeen("ranks that share a model may share a batch")


def steps_of_all(traces):
    """Return [the ranks' events of a step] for the steps that all ranks made."""
    by_label = [{step.label: step for step in trace.of("step")} for trace in traces]
    labels = [step.label for step in traces[0].of("step")]
    shared = [label for label in labels if all(label in its for its in by_label)]
    if not all(by_label):
        raise NotSeen("no optimizer step was made")
    if not shared:
        raise NotSeen("the ranks have no steps in common")
    return [[its[label] for its in by_label] for label in shared]


def loops_of_all(traces, train):
    """Return [(number, the ranks' loops, items)] of the loops over each loader.

    train: loops with optimizer steps, or else those without. items: the set that the
    ranks share out, or None if each rank has a set of its own.
    """
    known = [e for trace in traces for e in trace.of("loop") if e.has_items]
    training = {e.key for e in known if e.trains}
    # A loop that was stopped before its first step looks like an evaluation.
    chosen = {
        id(e)
        for e in known
        if e.trains == train and (train or e.whole or e.key not in training)
    }
    found = []
    for key in dict.fromkeys(e.key for e in known if id(e) in chosen):
        of_all = [
            [e for e in trace.of("loop") if e.key == key and id(e) in chosen]
            for trace in traces
        ]
        for number, loops in enumerate(zip_longest(*of_all), start=1):
            loops = [e for e in loops if e]
            found.append((number, loops, items_to_share(loops)))
    return found


def items_to_share(loops):
    """Return the set of items that the ranks share out, or None."""
    # The last level is the whole data set, the level before it the first Subset.
    levels = [*zip(*(e.sets for e in loops), strict=False)]
    for level, sets in enumerate(levels):
        if all(s == sets[0] for s in sets):
            return sets[0]
        # Subsets are shards if they are disjoint but for samples that fill them up.
        union = set.union(*sets)
        if sum(map(len, sets)) - len(union) >= len(loops):
            return None
        if level == len(levels) - 2:  # the rest may be there for another purpose
            return union
    return None


def count_items(loops, items):
    """Return how many items were repeated, and how many were left out."""
    dealt = Counter(i for e in loops for i in e.items)
    return dealt.total() - len(dealt), len(items - dealt.keys())


def differing(values, names, what="parameters"):
    """Return a text if tensors differ between the ranks, or "".

    values: the tensors' checksums by rank; names: the tensors' names.
    """
    bad = [i for i, v in enumerate(zip(*values, strict=False)) if len({*v}) > 1]
    if not bad:
        return ""
    first = f", first {names[bad[0]]}" if bad[0] < len(names) else ""
    return f"{len(bad)} of {len(values[0])} {what} differ between ranks{first}"
