"""Sums over ranks that are printed as if they were means."""

import re
from math import isclose

from ddp_checkup.checks.verdicts import OK, found
from ddp_checkup.formulas import shows

LATER = 8  # sums, between that of a number and its output


def sums_as_means(ranks):
    """Return a verdict: whether the job prints a sum of its ranks' means.

    Without DDP a loss may be a rank's part of the mean: its gradients are summed.
    """
    if any(r.unused is None for r in ranks):
        return OK
    for i, (line, *_) in enumerate(ranks[0].sums):
        notes = [
            r.sums[i] for r in ranks if len(r.sums) > i and r.sums[i][0] == line
        ]
        values = [number for *_, number in notes]
        total = sum(values)
        if len(notes) < len(ranks):
            continue
        means = all(is_mean(r, note) for r, note in zip(ranks, notes, strict=True))
        for place, before, text, known in ranks[0].outputs:
            mean = means or is_share(before, values, total)
            if i < known <= i + LATER and mean and shows(text, total):
                parts = " + ".join(f"{value:.4g}" for value in values)
                fix = "Divide the sum by the world size, or use ReduceOp.AVG."
                text = (
                    f"{place}: {text} is a sum over the ranks ({parts}, at {line})"
                )
                return found(f"{text}, and each was a mean", "warning", fix)
    return OK


def is_mean(rank, note):
    """Return whether a number was the last step's loss, or the mean of a loop's.

    Losses that a step accumulates are divided before backward(), or not.
    """
    _, count, first, passes, number = note
    losses = rank.losses[first:count]
    if not losses or not number:
        return False
    step, last = losses[-passes:], losses[-1]
    means = sum(step), sum(step) / len(step), last, last * passes
    means += (sum(losses) / len(losses),)
    return any(isclose(number, mean, rel_tol=1e-4) for mean in means)


def is_share(before, values, total):
    """Return whether the values may be accuracies, and their sum may not.

    Whole numbers may be counts, and the last word before a number says what it is.
    """
    named = re.search(r"acc\w*\W*$", before, re.IGNORECASE)
    if not named or all(value % 1 == 0 for value in values):
        return False
    return any(0 < max(values) <= whole < total for whole in (1, 100))
