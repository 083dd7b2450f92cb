"""Sums over ranks that are printed as if they were means."""

import re
from collections import Counter, defaultdict
from itertools import pairwise
from math import isclose

from ddp_checkup.checks.verdicts import OK, found
from ddp_checkup.formulas import ACCURACY, shows

# What is computed from all samples: the mean of the ranks' values is another number.
NAMES = "f1|f_?score|auroc|m?auc|m?ap|bleu|corr|kappa|mcc|[wc]er|ppl|perplexity|rmse"
NO_MEAN = re.compile(rf"(?<![a-z])({NAMES})\W*$", re.IGNORECASE)
LATER = 8  # sums, between that of a number and its output
OFTEN = 3  # times that a sum was summed again


def sums_as_means(ranks):
    """Return a verdict: whether the job prints a sum of its ranks' means.

    Without DDP a loss may be a rank's part of the mean: its gradients are summed.
    """
    again = summed_again(ranks)
    if again or any(r.unused is None for r in ranks):
        return again or OK
    divided = {}  # by text: sums that were divided by a count
    sums = [*of_all_ranks(ranks)]
    of_job = {  # what may be counts of all ranks
        sum(values)
        for _, notes in sums
        for values in zip(*(note.numbers for note in notes), strict=False)
    }
    for i, notes in sums:
        outputs = [o for o in ranks[0].outputs if i < o[-1] <= i + LATER]
        for values in zip(*(note.numbers for note in notes), strict=False):
            verdict = compare(ranks, notes, values, outputs, divided, of_job)
            if verdict:
                return verdict
    # One of many numbers may be equal by chance.
    return next(iter(divided.values())) if len(divided) > 1 else OK


def of_all_ranks(ranks):
    """Yield (number, notes): rank 0's sum of this number, and what goes into it."""
    by_line = [defaultdict(list) for _ in ranks]
    for notes, r in zip(by_line, ranks, strict=True):
        for note in r.sums:
            notes[note.line].append(note)
    seen = Counter()
    for i, (line, *_) in enumerate(ranks[0].sums):
        same = [its[line][seen[line] :] for its in by_line]
        seen[line] += 1
        if all(same):
            yield i, [notes[0] for notes in same]


def compare(ranks, notes, values, outputs, divided, of_job):
    """Return a warning if an output is the sum of the ranks' values, and no mean.

    notes: what is known of each rank's value; outputs: those after the sum; divided:
    gets, by text, a warning about each that was divided by the count of one rank;
    of_job: other sums, by which it may be divided.
    """
    total, line, averages = sum(values), notes[0].line, notes[0].averages
    parts = " + ".join(f"{value:.4g}" for value in values)
    of_all = [*zip(ranks, notes, values, strict=True)]
    means = all(is_mean(*each) for each in of_all)
    # The number of ranks makes a mean of it.
    counts = {sum(notes[0].sizes), len(notes[0].sizes)} - {0, 1, len(ranks)}
    counts -= of_job
    sums = all(is_sum(*each) for each in of_all)
    for place, before, text, _ in outputs:
        why = is_no_mean(notes, before)
        if why and shows(text, total / len(ranks)) and len({*values}) > 1:
            what = f"{place}: {text} is the mean of the ranks' own ({parts}, at"
            fix = "Gather what it is computed from, or add up its sums and counts."
            return found(f"{what} {line}), {why}", "warning", fix)
        if averages:
            continue
        what = f"{place}: {text} is a sum over the ranks ({parts}, at {line})"
        if shows(text, total) and (means or is_share(before, values, total)):
            fix = "Divide the sum by the world size, or use ReduceOp.AVG."
            return found(f"{what}, and each was a mean", "warning", fix)
        for count in counts:
            if sums and shows(text, total / count):
                fix = "Add up the counts over the ranks, too."
                why = f"{what}, divided by the count of rank 0 alone, {count}"
                divided[text] = found(why, "warning", fix)
    return None


def is_no_mean(notes, before):
    """Say why a mean of the ranks' values is not that of all samples, if it is not.

    before: the text before the number.
    """
    if NO_MEAN.search(before):
        return "not that of all samples"
    evaluates = all(note.sizes and note.first == note.count for note in notes)
    parts = [sum(note.sizes) for note in notes]
    if evaluates and len({*parts}) > 1:
        return f"who have evaluated {', '.join(map(str, parts))} samples"
    return ""


def is_mean(rank, note, number):
    """Return whether a number was the last step's loss, or the mean of a loop's.

    Losses that a step accumulates are divided before backward(), or not.
    """
    losses = rank.losses[note.first : note.count]
    if not losses or not number:
        return False
    step, last = losses[-note.passes :], losses[-1]
    means = sum(step), sum(step) / len(step), last, last * note.passes
    means += (sum(losses) / len(losses),)
    return any(isclose(number, mean, rel_tol=1e-4) for mean in means)


def is_sum(rank, note, number):
    """Return whether a number was the sum of a loop's losses, or of its samples'."""
    losses, sizes = rank.losses[note.first : note.count], note.sizes
    if len(losses) < 2 or len(losses) != len(sizes):
        return False
    by_sample = sum(a * b for a, b in zip(losses, sizes, strict=True))
    return any(
        isclose(number, total, rel_tol=1e-4) for total in (sum(losses), by_sample)
    )


def is_share(before, values, total):
    """Return whether the values may be accuracies, and their sum may not.

    Whole numbers may be counts.
    """
    if not ACCURACY.search(before) or all(value % 1 == 0 for value in values):
        return False
    return any(0 < max(values) <= whole < total for whole in (1, 100))


def summed_again(ranks):
    """Return a warning about a running total that is reduced again and again.

    What a rank adds to the total of all is small: then its number is never less than
    the total before. Its own running total grows by less.
    """
    for line in dict.fromkeys(note.line for note in ranks[0].sums):
        of_all = [[n for n in r.sums if n.line == line] for r in ranks]
        times, more = 0, False  # more: than it was, and so something was added
        for before, after in pairwise(zip(*of_all, strict=False)):
            if not after[0].again:
                continue  # another tensor, such as that of the next epoch
            totals = map(sum, zip(*(note.numbers for note in before), strict=False))
            grows = False
            for k, total in enumerate(totals):
                now = [note.numbers[k] for note in after if len(note.numbers) > k]
                grows |= total > 0 and all(n >= total for n in now)
                more |= total > 0 and all(n > total for n in now)
            times = times + 1 if grows else 0
            if times >= OFTEN and more:
                text = f"{line}: the sum over the ranks is summed again, with what"
                fix = "Reduce it once, after the loop, or reduce each batch's part."
                return found(f"{text} was added since", "warning", fix)
    return None
