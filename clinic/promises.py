"""What a DDP script promises, how the checkup sees it, and how to fix it.

- each process has a device of its own: the parameters' devices are compared. Choose
  it by local_rank.
- all start from the same weights: compared before the first step. Wrap the model in
  DDP, which sends rank 0's weights to all.
- gradients are averaged: compared by parameter, at each step. Wrap the model again
  when layers are unfrozen, and train by the wrapper.
- all have the same weights after each step: compared by parameter. Give the
  optimizers of all processes the same options and the same state.
- each image goes to one process, none is left out: the indices that the loader
  dealt out in an epoch. Give it a DistributedSampler, made with rank and not with
  local_rank.
- each epoch has an order of its own: the same indices, over epochs. Call
  sampler.set_epoch(epoch) before each.
- all split the data alike: length and items of the set, and indices of subsets.
  Draw and split by a torch.Generator that has the same seed in all processes.
- processes draw different random numbers: random states at the first step, if
  training draws any. Call torch.manual_seed(seed + rank).
- evaluation counts each sample once: the indices that loops without steps saw. Take
  Subset(data, range(rank, len(data), world_size)): no sampler fills it up.
- all take part in each collective: kind and shape, compared before it begins. Call
  it in all processes: neither it nor a wrapped model belongs within `if rank == 0`.
- one process writes each file: files that several open for writing. Write them
  within `if rank == 0`.
- a step does not wait for the device: computed numbers that are read in each step.
  Add them up on the device, and read the sum once an epoch.
- the printed numbers are the whole job's: what rank 0 prints after an epoch, and
  what it read of its own before. Add up the sums of all processes first, by
  dist.all_reduce.
- the group is ended: by destroy_process_group. Call it at the end.
"""

import re
from collections import Counter
from itertools import zip_longest
from pathlib import Path

import torch

# Each function gets what the processes saw (hooks.me). It returns why the promise is
# broken, or else why that cannot be seen; two empty texts if it is kept.


def device(every):
    devices = Counter(r.device for r in every)
    shared = [d for d, n in devices.items() if n > 1]
    if not_stepped(every) or "cpu" in devices:
        return "", not_stepped(every) or "on CPUs processes share the cores"
    return f"several have {shared[0]}" if shared else "", ""


def not_stepped(every):
    return "" if all(r.steps for r in every) else "no training step"


def differ(every, part):
    """Say where and since when parameters differ between processes, if they do."""
    for step, of_all in enumerate(
        zip(*(getattr(r, part) for r in every), strict=False)
    ):
        bad = [i for i, v in enumerate(zip(*of_all, strict=False)) if len({*v}) > 1]
        if bad:
            line, names = every[0].lines[step]
            many = f"{len(bad)} of {len(names)} parameters differ"
            return f"{line}, since step {step + 1}: {many}, first {names[bad[0]]}"
    return ""


def different(every):
    """Return whether processes have parts of a model: they may share a batch."""
    lines = [r.lines[0][1] for r in every if r.lines]
    return any(line != lines[0] for line in lines) or any(r.cut for r in every)


def no_replicas(every):
    """Say why the processes have no copies of one model, if so."""
    if any(r.sharded for r in every):
        return "the parameters are sharded"
    if not all(r.grads for r in every):
        return not_stepped(every) or "a GPU that waits cannot be read"
    parts = "the processes have different parameters" * different(every)
    return not_stepped(every) or parts


def start(every):
    return (
        ("", no_replicas(every))
        if no_replicas(every)
        else (differ(every, "start"), "")
    )


def gradients(every):
    return (
        ("", no_replicas(every))
        if no_replicas(every)
        else (differ(every, "grads"), "")
    )


def weights(every):
    before = start(every)[0] or gradients(every)[0]
    if no_replicas(every) or before:
        return "", no_replicas(every) or "that follows from what is broken above"
    return differ(every, "weights"), ""


def passes(every, trains):
    """Yield of each pass over a loader: its line and number, what each process did,
    and the items that they had to share out (None if each had some of its own)."""
    known = [e for r in every for e in r.epochs]
    training = {e.key for e in known if e.trains}
    # One that was stopped before its first step looks like an evaluation.
    known = [e for e in known if e.trains or e.whole or e.key not in training]
    for key in dict.fromkeys(e.key for e in known if e.trains == trains):
        ours = {id(e) for e in known if e.key == key and e.trains == trains}
        of_all = [[e for e in r.epochs if id(e) in ours] for r in every]
        for number, group in enumerate(zip_longest(*of_all), start=1):
            group, items = [e for e in group if e], None
            for sets in zip(*(e.sets for e in group), strict=False):
                # Subsets are shares if they are apart, but for what fills them up.
                again = sum(map(len, sets)) - len(set.union(*sets))
                if all(s == sets[0] for s in sets):
                    items = sets[0]
                if items or again >= len(group):
                    break
            yield key.rpartition(" ")[0], number, group, items


def images(every):
    why, unseen = "", no_replicas(every) or "no loader was seen"
    if different(every):
        return why, unseen
    for line, number, group, items in passes(every, True):
        first = group[0]
        alike = all(e.sample == first.sample for e in group)
        known = first.shares or len(first.sets) > 1 or (first.sample and alike)
        twice = any(len(e.items) - len({*e.items}) >= len(every) for e in group)
        if items is None or first.free or not known or (twice and not first.shares):
            unseen = (
                "see the split" if items is None else "each may have its own set"
            )
            unseen = "images are drawn again" if first.free or twice else unseen
            continue
        dealt, unseen = Counter(i for e in group for i in e.items), ""
        again, missing = dealt.total() - len(dealt), len(items - dealt.keys())
        whole = all(e.whole for e in group) and len(group) == len(every)
        may_miss = first.batch * len(every) * first.drops if whole else len(items)
        if again >= len(every) or missing > may_miss:
            why = why or (
                f"{line}, epoch {number}: of {len(items)} images {again} are dealt "
                f"out once more, {missing} never"
            )
    return why, unseen


def order(every):
    before, unseen = {}, not_stepped(every) or "there was one epoch"
    for line, number, group, _ in passes(every, True):
        now, last = group[0].order, before.get(line)
        before[line] = now
        if last and min(len(now), len(last)) >= 8:  # a few may be alike by chance
            shown = min(len(now), len(last))
            unseen = "the loader does not shuffle" * (now == sorted(now))
            if now[:shown] == last[:shown] and not unseen:
                which = f"epoch {number} has the order of epoch {number - 1}"
                return f"{line}: {which}", ""
    return "", unseen


def split(every):
    unseen = not_stepped(every) or "the script did not come to its end"
    for line, number, group, items in passes(every, True):
        if items is None:
            return (
                f"{line}: the processes' subsets are neither the same nor apart",
                "",
            )
        if number == 1 and group[0].shares and len(group) < len(every):
            return f"{line}: the sets have different lengths", ""
        if number == 1 and group[0].sample and len(group) == len(every):
            same = all(e.sample == group[0].sample for e in group)
            unseen = "" if same else "each process has a set of its own"
            if group[0].shares and not same:
                return f"{line}: the same index gives different items", ""
    return "", unseen


def randomness(every):
    if not_stepped(every) or any(len(r.draws) < 2 for r in every):
        return "", not_stepped(every) or "no epoch has two steps"
    (first, second), names = every[0].draws, {"CPU"}
    if not any(e.drawn for e in every[0].epochs):
        names = {n for n in first if not torch.equal(first[n], second[n])}
    same = [
        n for n in names if all(torch.equal(r.draws[0][n], first[n]) for r in every)
    ]
    if same:
        line = every[0].lines[0][0]
        return (
            f"{line}, at step 1: the {same[0]}'s random state is the same in all",
            "",
        )
    return "", "" if names else "training draws none"


def evaluation(every):
    unseen = not_stepped(every) or "no loop without steps was seen"
    if not_stepped(every):
        return "", unseen
    for line, number, group, items in passes(every, False):
        stopped = len(group) < len(every) and not ended(every)
        other = any(e.also_trains for e in group)  # say, to update BatchNorm
        if items is None or stopped or other or not all(e.whole for e in group):
            continue
        dealt, unseen = Counter(i for e in group for i in e.items), ""
        again, missing = dealt.total() - len(dealt), len(items - dealt.keys())
        if missing or (again and not all_of(group, items)):
            many = (
                f"{again} of {len(items)} samples count twice, {missing} not at all"
            )
            return f"{line}, pass {number}: {many}", ""
    return "", unseen


def collectives(every):
    """Those that differ in kind or shape have ended the job: checkup.py says so."""
    for ranks in {group for r in every for group in r.counts}:
        counts = {
            r.rank: r.counts[ranks] for r in every if not ranks or r.rank in ranks
        }
        if len({*counts.values()}) > 1 and ended(every):
            most = max(counts, key=counts.get)
            last = next(r.last[ranks] for r in every if r.rank == most)
            return f"{last}: rank {most} comes to more of them than others", ""
    return "", "" if any(r.counts for r in every) else "there was none"


def ended(every):
    return all(r.came_to_end for r in every)


def files(every):
    several = Counter(file for r in every for file in r.files)
    for (path, _), number in several.items():
        if number > 1:
            line = next(r.files[f] for r in every for f in r.files if f[0] == path)
            return f"{line}: {number} processes write {Path(path).name}", ""
    return "", "" if several else "no file was written"


def waits(every):
    for r in every:
        for line, steps in r.reads.items():
            if r.trained >= 3 and steps >= 0.9 * r.trained:
                many = f"in {steps} of {r.trained} steps"
                return f"{line}: rank {r.rank} reads a number {many}", ""
    few = "too few steps within epochs" * any(r.trained < 3 for r in every)
    return "", not_stepped(every) or few


def printed(every):
    seen = {g[0].key for _, _, g, items in passes(every, False) if all_of(g, items)}
    for key, (why, matches, prints) in every[0].own.items():
        often = matches and 2 * matches >= prints  # else it is by chance
        if often and key not in seen and not different(every):
            return why, ""
    return "", "" if every[0].merged else "where they come from cannot be told"


def all_of(group, items):  # each process has evaluated all samples
    return all({*e.items} == items for e in group)


def group(every):
    if not ended(every):
        return "", "the script did not come to its end"
    if all(r.closed is None for r in every):
        return "", "there was none"
    return "" if all(r.closed for r in every) else "no process may leave before", ""


JUDGES = [device, start, gradients, weights, images, order, split, randomness]
JUDGES += [evaluation, collectives, files, waits, printed, group]
TEXTS = re.findall(
    r"^- ([^:]*): (.*?)\.\s+([A-Z].*?)\.$(?=\n-|\n\Z)", __doc__, re.M | re.S
)


def judge(every, trouble=""):
    """Return rows (promise, state, why, remedy); trouble: of the collectives."""
    for (promise, _, remedy), function in zip(TEXTS, JUDGES, strict=True):
        why, unseen = function(every)
        if function is collectives and trouble:
            why = trouble
        state = "broken" if why else "not seen" if unseen else "kept"
        yield promise, state, why or unseen, " ".join(remedy.split())
