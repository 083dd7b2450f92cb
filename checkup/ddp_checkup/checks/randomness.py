"""The check that ranks draw different random numbers."""

from ddp_checkup.checks.common import first_step, have_parts, loops_of_all
from ddp_checkup.checks.findings import Finding, NotSeen, check


@check(
    "seeds",
    "ranks draw different random numbers",
    fix="Call torch.manual_seed(seed + rank), and seed NumPy and random likewise.",
    level="warning",
)
def seeds(traces):
    """the states of all random number generators that training and workers use"""
    step = first_step(traces[0])
    if have_parts(traces):
        raise NotSeen("ranks that share a model may share a seed")
    pairs = [two_steps(trace) for trace in traces]
    if not all(pairs):
        raise NotSeen("no epoch has two steps")
    first, second = pairs[0]
    drawn = [name for name in first if first[name] != second[name]]
    for name in drawn:
        text = f"at step 1, all ranks have the same state of {name}"
        if len({states.get(name) for states, _ in pairs}) > 1:
            seeds_of_all = {trace.first("first step").seed for trace in traces}
            if not name.startswith("PyTorch") or len(seeds_of_all) > 1:
                continue
            text = (
                f"all ranks have seeded {name} with {seeds_of_all.pop()}, and then"
            )
            text += " drew different amounts from it"
        return Finding(step.line, text)
    for _, loops, _ in loops_of_all(traces, True):
        for worker, states in loops[0].workers.items():
            for name in loops[0].random if len(loops) == len(traces) else ():
                drawn.append(name)
                others = [e.workers.get(worker, {}).get(name) for e in loops[1:]]
                if all(other == states[name] for other in others):
                    text = f"worker {worker} of each rank's loader begins with the"
                    return Finding(loops[0].line, f"{text} same state of {name}")
    if not drawn:
        raise NotSeen("no random numbers were drawn")
    return None


def two_steps(trace):
    """Return the generators' states before two steps of one loop."""
    steps = [step for step in trace.of("step") if step.random]
    # Between the steps of two optimizers there may be no random numbers.
    for first in steps:
        others = [e for e in steps if e.time > first.time and e.loops == first.loops]
        if others:
            return first.random, others[-1].random
    return None
