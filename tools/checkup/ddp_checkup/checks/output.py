"""Checks of collectives, of files and of printed numbers."""

from pathlib import Path

from ddp_checkup.checks.loops import auxiliary, loops
from ddp_checkup.checks.ranks import have_parts, no_steps
from ddp_checkup.checks.verdicts import OK, check, found, unseen


@check(
    "all ranks leave the training loop after the same epoch",
    seen="the loops that the ranks are in when the job hangs",
    fix="Let all ranks decide alike: dist.all_reduce() the sums of the validation "
    "loss before the decision, or the decision itself.",
)
def stops_together(ranks):
    if not all(r.loops for r in ranks):
        return unseen(no_steps(ranks) or "the script has no training loop")
    last = max(ranks, key=lambda r: r.begun)
    loop = last.loops[0]
    for r in ranks:
        left = loop in r.loops and loop not in r.inside
        if left and loop in last.inside and r.begun < last.begun:
            text = f"rank {r.rank} left the loop after epoch {r.begun}"
            return found(f"{loop}: {text}, and rank {last.rank} did not")
    return OK


@check(
    "all ranks take part in forwards of the wrapped model",
    seen="forwards of the DDP model, compared before each begins",
    fix="Evaluate ddp_model.module on rank 0, or evaluate on all ranks.",
)
def rank0_eval(ranks):
    # A mismatch stops the job: report.py.
    return OK if any(r.counts for r in ranks) else unseen("no DDP model was used")


@check(
    "all ranks take part in each collective",
    seen="name and shape, compared before each begins, and their number at the end",
    fix="Call it on all ranks: neither a collective nor a forward of the wrapped "
    "model belongs within `if rank == 0`, or after a `break` of some ranks only.",
)
def collectives(ranks):
    if stops_together(ranks).state == "found":
        return unseen("see stops-together")
    for members in {m for r in ranks for m in r.counts}:
        group = [r for r in ranks if not members or r.rank in members]
        done = [r.counts[members] for r in group if r.done]
        most = max(group, key=lambda r: r.counts[members])
        if done and most.counts[members] > min(done):
            text = f"rank {most.rank} comes to more of them than others"
            return found(f"{most.last[members]}: {text}")
    return OK if any(r.counts for r in ranks) else unseen("there was none")


@check(
    "one rank writes each file",
    seen="files that are opened for writing",
    fix="Write it within `if rank == 0`, or put the rank into its name.",
)
def files(ranks):
    all_files = {file for r in ranks for file in r.files}
    verdict = OK if all_files else unseen("no file was written")
    for file in sorted(all_files):
        writes = [r.files[file] for r in ranks if file in r.files]
        if len(writes) > 1:
            text = f"{writes[0][0]}: {len(writes)} ranks write {Path(file[0]).name}"
            if not all(append for _, append in writes):
                return found(text)
            verdict = found(text, "warning")
    return verdict


@check(
    "printed numbers are the whole job's",
    seen="what rank 0 prints or logs after a loop, and the tensors that it has read",
    fix="Add up sums and counts of all ranks with dist.all_reduce() first.",
)
def own_number(ranks):
    if have_parts(ranks):
        return unseen("ranks that share a model may share a batch")
    alone, full, rest = set(), set(), set()
    all_loops = [*loops(ranks, False)]
    for _, _, group, items in all_loops:
        if len(group) < len(ranks):
            alone.add(group[0].key)
        elif items and all({*e.items} == items for e in group):
            full.add(group[0].key)
        else:
            rest |= {e.key for e in auxiliary(all_loops, group)}
    warning = ""
    for (kind, line, key), printed in ranks[0].prints.items():
        text, matches, prints, evaluates = printed
        often = matches and 2 * matches >= prints  # else it is by chance
        if not often or key in alone | full - rest:
            continue
        reads = [str(r.read.get(line)) for r in ranks]
        if kind == "own" and len({*reads}) == 1:
            continue  # it is the same on all ranks
        if evaluates is None and "None" in reads:  # there is no loader
            continue  # not all ranks evaluate
        reason = "its own part of the evaluation"
        if kind == "sum":
            reason = "a sum over ranks, not a mean"
        elif evaluates:
            return found(f"{text}: {reason}")
        elif evaluates is False:
            reason = "its own loss"
        warning = warning or f"{text}: {reason}"
    if warning:
        return found(warning, "warning")
    seen = ranks[0].prints or ranks[0].reduced
    return OK if seen else unseen("no number of a tensor was read")


@check(
    "a step does not wait for the device",
    seen="computed numbers that are read in each step",
    fix="Add them up on the device, and read the sum once per epoch.",
    level="advice",
)
def host_sync(ranks):
    for r in ranks:
        for line, steps in r.syncs.items():
            if r.trained >= 3 and steps >= 0.9 * r.trained:
                many = f"in {steps} of {r.trained} steps"
                return found(f"{line}: rank {r.rank} reads a number {many}")
    few = any(r.trained < 3 for r in ranks)
    return unseen(no_steps(ranks) or "too few steps") if few else OK


@check(
    "the process group is destroyed at the end",
    seen="calls of destroy_process_group",
    fix="Call dist.destroy_process_group() at the end: else NCCL warns, and a rank "
    "that leaves early can break the others.",
    level="advice",
)
def destroy_group(ranks):
    if not all(r.done for r in ranks):
        return unseen("the script did not come to its end")
    if all(r.closed is None for r in ranks):
        return unseen("there was no process group")
    if any(r.framework for r in ranks):
        return unseen("the framework does that")
    return OK if all(r.closed for r in ranks) else found("it was not destroyed")
