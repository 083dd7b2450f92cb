"""The check that an evaluation counts each sample once."""

from ddp_checkup.checks.common import count_items, loops_of_all, need_own_batches
from ddp_checkup.checks.findings import Finding, NotSeen, check


@check(
    "eval-coverage",
    "evaluation counts each sample once",
    fix="Evaluate Subset(dataset, range(rank, len(dataset), world_size)): a "
    "DistributedSampler repeats samples to fill up.",
)
def eval_coverage(traces):
    """the indices dealt out by loops without optimizer steps"""
    need_own_batches(traces)
    why = "no loop without steps was seen"
    done = all(trace.finished for trace in traces)
    all_loops = loops_of_all(traces, False)
    for number, loops, items in all_loops:
        stopped = len(loops) < len(traces) and not done
        other = any(e.also_trains for e in loops)  # for example to update BatchNorm
        if items is None or stopped or other or not all(e.whole for e in loops):
            continue
        if all({*e.items} == items for e in loops):
            why = ""
            continue
        loops = [*loops, *rest_of_the_data(all_loops, loops)]
        again, missing = count_items(loops, items)
        batch = max(e.batch_size for e in loops) * len(traces)
        fills_up = again and not missing and again < batch
        # The script may cut what it gathered, unless it prints too large a total.
        printed = traces[0].first("totals").totals
        shown = len(items) + again in printed and len(items) not in printed
        if fills_up and any(e.gathered for e in loops) and not shown:
            why = "the script may cut what it has gathered"
            continue
        if any(e.chooses for e in loops):
            why = "the script's own sampler chooses the samples"
            continue
        why = ""
        if again or missing:
            text = f"{again} of {len(items)} samples count twice, {missing} never"
            small = again < len(traces) and missing < batch
            level = "warning" if small else "error"
            return Finding(loops[0].line, f"loop {number}: {text}", level)
    if why:
        raise NotSeen(why)
    return None


def rest_of_the_data(all_loops, loops):
    """Return loops over the rest of the same data set, without steps in between."""
    first, dealt, added = loops[0], {i for e in loops for i in e.items}, []
    for e in (e for _, others, _ in all_loops for e in others):
        same_time = (e.base, e.first) == (first.base, first.first)
        if same_time and not dealt & {*e.items}:
            dealt |= {*e.items}
            added.append(e)
    return added
