"""Checks of what a loss is made of."""

from collections import defaultdict

from ddp_checkup.checks.ranks import no_replicas
from ddp_checkup.checks.sums import of_all_ranks
from ddp_checkup.checks.verdicts import OK, check, found, unseen


@check(
    "what the ranks gather for the loss has a gradient",
    seen="the graph of autograd from the loss to what was gathered, and the labels",
    fix="Put this rank's own tensor back in its place among the gathered ones, or "
    "use torch.distributed.nn.functional.all_gather().",
    level="warning",
)
def gathered(ranks):
    for line in (r.cut_off for r in ranks if r.cut_off):
        text = "to backward() all gathered tensors are constants, the rank's own too"
        return found(f"{line}: {text}")
    for line in (r.constant for r in ranks if r.constant):
        text = "gathered tensors and a part of the loss have no gradient"
        return found(f"{line}: {text}")
    for line, labels in ranks[0].contrasts.items():
        alike = all(r.contrasts.get(line) == labels for r in ranks)
        if len(labels) > 2 and alike:
            text = "all ranks have the same labels, while the gathered tensors have"
            text += " each rank's in another place"
            fix = "Add rank * batch_size to the labels."
            return found(f"{line}: {text}", fix=fix)
    for line in (r.own_rows for r in ranks if r.own_rows):
        text = "each rank's loss is of its own rows, and its tensor gets no gradient"
        text += " from the other ranks' losses"
        fix = "Compute the loss of all rows on each rank, or use"
        fix += " torch.distributed.nn.functional.all_gather()."
        return found(f"{line}: {text}", fix=fix)
    none = "all_gather() was not called before a loss"
    return OK if any(r.gathers for r in ranks) else unseen(none)


@check(
    "all ranks weight the classes alike in the loss",
    seen="the class weights of cross_entropy(), nll_loss() and BCEWithLogitsLoss",
    fix="Count the classes of all samples, or sum the ranks' counts by "
    "dist.all_reduce(), before you compute the weights.",
)
def class_weights(ranks):
    if no_replicas(ranks):
        return unseen(no_replicas(ranks))
    for line in ranks[0].class_weights:
        by_rank = [[*r.class_weights.get(line, {}).values()] for r in ranks]
        # Weights that change from step to step may be those of samples.
        constant = all(len(its) > 2 and its == its[:1] * len(its) for its in by_rank)
        if constant and any(its[0] != by_rank[0][0] for its in by_rank):
            return found(f"{line}: the ranks' class weights differ in all steps")
    return OK if ranks[0].class_weights else unseen("no loss had weights")


MUCH = 0.1  # of a mean count: how far those of the ranks are apart


@check(
    "a mean loss weights the samples or tokens of all ranks alike",
    seen="the counts by which a loss was divided, in its graph of autograd",
    fix="Add up the counts of all ranks by dist.all_reduce(); divide each rank's "
    "sum by that total, times the world size, which DDP divides by.",
    level="warning",
)
def loss_count(ranks):
    if any(r.unused is None for r in ranks):
        return unseen("no DDP averages the gradients")
    seen, apart, twice = 0, [], []
    totals = defaultdict(set)  # what the ranks added up, by losses before it
    for _, notes in of_all_ranks(ranks):
        for values in zip(*(note.numbers for note in notes), strict=False):
            totals[notes[0].count].add(sum(values))
    for label, (first, *_) in ranks[0].divisors.items():
        notes = [r.divisors.get(label, [None])[0] for r in ranks]
        if None in notes:
            continue
        seen += 1
        for of_all in zip(*(parts for *_, parts in notes), strict=False):
            counts = [count for count, *_ in of_all]
            factors = [others for _, *others in of_all]
            whole = all(n >= 1 and abs(n - round(n)) < 1e-3 for n in counts)
            alike = len({*counts}) == 1
            scaled = float(len(ranks)) in factors[0]
            if not whole or any(others != factors[0] for others in factors):
                continue
            spread = (max(counts) - min(counts)) * len(counts)
            if spread > MUCH * sum(counts):
                apart.append((first[0], counts))
                break
            its = totals[first[1] - 1]
            of_job = counts[0] in its and counts[0] * len(ranks) not in its
            if alike and counts[0] > len(ranks) and of_job and not scaled:
                twice.append((first[0], counts))
                break
    if seen < 3:
        return unseen("no loss was divided by a count")
    if 2 * len(twice) > seen:
        line, of_all = twice[0]
        text = f"{line}: each rank divides its loss by the count of all ranks"
        text += f" ({of_all[0]:.0f}), and DDP divides by the world size again"
        fix = "Multiply by the world size, or divide by the mean count of the ranks."
        return found(text, fix=fix)
    if 2 * len(apart) < seen:
        return OK
    line, of_all = apart[0]
    counts = ", ".join(f"{n:.0f}" for n in of_all)
    text = f"{line}: each rank divides its loss by its own count ({counts}), and DDP"
    return found(f"{text} averages these means, whatever their counts")
