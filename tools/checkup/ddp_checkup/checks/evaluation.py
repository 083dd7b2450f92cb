"""The check that an evaluation counts each sample once."""

from ddp_checkup.checks.loops import auxiliary, count, loops
from ddp_checkup.checks.ranks import no_own_batches
from ddp_checkup.checks.verdicts import OK, check, found, unseen
from ddp_checkup.formulas import shows


@check(
    "evaluation counts each sample once",
    seen="the indices dealt out by loops without optimizer steps",
    fix="Evaluate Subset(dataset, range(rank, len(dataset), world_size)): a "
    "DistributedSampler repeats samples to fill up.",
)
def eval_coverage(ranks):
    if no_own_batches(ranks):
        return unseen(no_own_batches(ranks))
    why, undecided = "no loop without steps was seen", ""
    all_loops = [*loops(ranks, False)]
    for line, number, group, items in all_loops:
        stopped = len(group) < len(ranks) and not all(r.done for r in ranks)
        other = any(e.also_trains for e in group)  # for example to update BatchNorm
        if items is None or stopped or other or not all(e.whole for e in group):
            continue
        if all({*e.items} == items for e in group):
            why = ""
            continue
        group = [*group, *auxiliary(all_loops, group)]
        again, missing = count(group, items)
        batch = max(e.batch for e in group) * len(ranks)
        fills_up = again and not missing and again < batch
        dealt = len(items) + again
        printed = ranks[0].totals & {dealt, len(items)}
        shown = printed == {dealt} or are_shares(ranks[0], dealt, len(items))
        if fills_up and any(e.gathered for e in group) and not shown:
            undecided = "the script may cut what it has gathered"
            continue
        why = ""
        chosen = any(e.chooses for e in group) and not (fills_up and shown)
        if (again or missing) and chosen:
            undecided = "the script's own sampler chooses the samples"
        elif again or missing:
            text = f"{again} of {len(items)} samples count twice, {missing} never"
            small = again < len(ranks) and missing < batch
            level = "warning" if small else "error"
            return found(f"{line}, loop {number}: {text}", level)
    why = undecided or why
    return unseen(why) if why else OK


def are_shares(rank, dealt, true):
    """Return whether printed accuracies are shares of all samples that were dealt.

    Few numbers with four digits are such a share by chance.
    """

    def shares(n):
        found = set()
        for text in rank.accuracies:
            for whole in (1, 100):
                hits = round(float(text) / whole * n)
                if 0 < hits < n and len(text) > 5 and shows(text, whole * hits / n):
                    found.add(text)
        return found

    of_dealt, of_true = shares(dealt), shares(true)
    return len(of_dealt - of_true) > max(1, 2 * len(of_true - of_dealt))
