"""The check that ranks draw different random numbers."""

from ddp_checkup.checks.data import same_batch
from ddp_checkup.checks.loops import loops
from ddp_checkup.checks.ranks import have_parts, no_steps
from ddp_checkup.checks.verdicts import OK, check, found, unseen


@check(
    "ranks draw different random numbers",
    seen="the states of all random number generators that training and the "
    "loaders' workers use",
    fix="Call torch.manual_seed(seed + rank), and seed NumPy and random likewise.",
    level="warning",
)
def seeds(ranks):
    if no_steps(ranks) or any(len(r.random) < 2 for r in ranks):
        return unseen(no_steps(ranks) or "no epoch has two steps")
    if have_parts(ranks):
        return unseen("ranks that share a model may share a seed")
    if same_batch(ranks).state == "found":
        return unseen("see same-batch")
    for line, mine in ranks[0].given.items():
        for other in ranks[1:]:
            if mine == other.given.get(line) and any(sum_ for _, sum_ in mine):
                text = f"ranks 0 and {other.rank} gather the same tensor"
                return found(f"{line}: {text} {mine[0][0]}")
    first, second = ranks[0].random
    drawn = [n for n in first if all(n in r.random[0] for r in ranks)]
    drawn = [n for n in drawn if first[n] != second[n]]
    step = f"{ranks[0].models[0][0]}, at step 1"
    for name in drawn:
        text = f"{step}: all ranks have the same state of {name}"
        if any(r.random[0][name] != first[name] for r in ranks):
            seeds_of_all = {r.seeds.get(name) for r in ranks}
            if None in seeds_of_all or len(seeds_of_all) > 1:
                continue
            text = f"{step}: all ranks have seeded {name} with {seeds_of_all.pop()}"
            text += "; its states differ as the ranks have drawn other amounts"
        return found(text, "advice" if any(r.framework for r in ranks) else None)
    for line, _, group, _ in loops(ranks, True):
        if len(group) < len(ranks):
            continue
        for worker, states in group[0].workers.items():
            for name in group[0].random:
                drawn.append(name)
                others = [e.workers.get(worker, {}).get(name) for e in group[1:]]
                if all(other == states[name] for other in others):
                    text = f"worker {worker} of each rank's loader begins with the"
                    return found(f"{line}: {text} same state of {name}")
    return OK if drawn else unseen("no random numbers were drawn")
