"""Checks of what no optimizer has: buffers, copies of models, running statistics."""

from collections import Counter
from itertools import compress

from ddp_checkup.checks.ranks import no_replicas
from ddp_checkup.checks.training import count_differing, weights
from ddp_checkup.checks.verdicts import OK, check, found, unseen


@check(
    "all ranks evaluate and save the same buffers and copies",
    seen="checksums of what no optimizer has, after evaluations and at the end",
    fix="Broadcast rank 0's buffers before the evaluation. Update "
    "copies and buffers by what was averaged over the ranks.",
)
def buffers(ranks):
    if no_replicas(ranks):
        return unseen(no_replicas(ranks))
    if weights(ranks).state != "ok":
        return unseen("see start, gradients and weights")
    seen, verdict = bool(ranks[0].overwritten), overwritten(ranks)
    if verdict is OK:
        verdict = own_statistics(ranks)
        seen = seen or verdict is not OK
    for names_of_all in same_modules(ranks):
        named = [*zip(ranks, names_of_all, strict=True)]
        notes = [r.tensors.get(name, []) for r, name in named]
        old, *others = [r.first.get(name, {}) for r, name in named]
        apart = {n for n in old if any(its.get(n) != old[n] for its in others)}
        if len({*map(len, notes)}) > 1:  # not all ranks evaluate it
            notes = [its[-1:] for its in notes]
        for of_all in zip(*notes, strict=False):
            line, evaluated, names, now, trains = of_all[0]
            alike = all(note[2] == names for note in of_all)
            seen = seen or (bool(names) and alike)
            what = f"tensors of {names_of_all[0][0]}"
            same = {n for n, v in zip(names, now, strict=True) if old.get(n) == v}
            calls = [r.called[name] for r, name in named if name in r.called]
            # What differed at first may be constant, or a copy for one rank alone.
            left_out = apart & (same if trains else {*names})
            if evaluated or len(calls) == len(ranks):
                left_out = set()
            changed = not evaluated and alike and changed_by_one(named, of_all)
            all_use = changed and len(calls) > 1  # a copy, such as an EMA
            if changed and not all_use:
                left_out |= changed
            kept = [n not in left_out for n in names]
            sums = [[*compress(note[3], kept)] for note in of_all]
            differ = count_differing(sums, [*compress(names, kept)], what)
            saved = [r.saved[name] for r, name in named if name in r.saved]
            used = evaluated or saved or all_use
            if alike and differ and (evaluated or line == "at the end"):
                used_by = saved or calls
                if used_by and line == "at the end":
                    line = f"{used_by[0]}, {line}"
                verdict = found(f"{line}: {differ}", "error" if used else "warning")
                if used:
                    return verdict
    return verdict if seen else unseen("there was none")


def same_modules(ranks):
    """Return [the names that one module has on the ranks].

    A name is (class, first line, number). A rank may use a module first in another
    line, or have one more: what is left is compared in its order.
    """
    of_all = [[*r.tensors] for r in ranks]
    in_all = [name for name in of_all[0] if all(name in names for names in of_all)]
    found = [[name] * len(ranks) for name in in_all]
    others = [[n for n in names if n not in in_all] for names in of_all]
    for kind in dict.fromkeys(name[0] for name in others[0]):
        of_kind = [[n for n in names if n[0] == kind] for names in others]
        found += zip(*of_kind, strict=False)
    return found


def overwritten(ranks):
    """Return a warning about a buffer that each rank changes, and DDP overwrites."""
    times = Counter()
    for label, (line, names, _) in ranks[0].overwritten.items():
        notes = [r.overwritten[label] for r in ranks if label in r.overwritten]
        of_all = zip(*(values for *_, values in notes), strict=False)
        if len(notes) == len(ranks):
            pairs = zip(names, of_all, strict=False)
            times.update(
                (line, name) for name, values in pairs if len({*values}) > 1
            )
    for (line, name), number in times.items():
        if number >= 3:
            text = f"DDP overwrites {name} by rank 0's at each forward, and discards"
            fix = "Update it by what was gathered or averaged over the ranks."
            return found(f"{line}: {text} the other ranks' changes", "warning", fix)
    return OK


def own_statistics(ranks):
    """Return a warning about objects that hold other means on each rank."""
    for name, mine in ranks[0].statistics.items():
        others = [r.statistics.get(name, []) for r in ranks[1:]]
        same_number = all(len(its) == len(mine) for its in others)
        if same_number and any(its != mine for its in others):
            text = f"at the end: mean and variance of {name} differ between ranks"
            fix = "Update them by sums and counts of all ranks."
            return found(text, "warning", fix)
    return OK


def changed_by_one(named, of_all):
    """Return the names of a module's tensors that one rank alone has changed.

    named: (rank, its name of the module).
    """
    changed = Counter()
    for (r, name), (_, _, names, now, _) in zip(named, of_all, strict=True):
        old = r.first.get(name, {})
        changed.update(n for n, v in zip(names, now, strict=True) if old.get(n) != v)
    return {n for n, times in changed.items() if times == 1}
