"""Checks of collectives, files and printed numbers."""

import re
from collections import Counter
from itertools import permutations
from pathlib import Path
from tempfile import gettempdir

from ddp_checkup.checks.common import have_parts, loops_of_all
from ddp_checkup.checks.findings import Finding, NotSeen, check, worst
from ddp_checkup.hooks.formulas import compute

FEW = 50  # samples of a rank: with fewer, ranks may get equal results by chance
# A date and a time of day, a time of day, or seconds since 1970, with fractions
CLOCK = re.compile(r"(\d{8}\D?\d{4,6}|\d\d\D\d\d\D\d\d|\d{10})(\D?\d+)*")
WRITES = "write", "append", "events", "rename"


@check(
    "collectives",
    "all ranks take part in each collective",
    fix="Call it on all ranks, and make equally many steps on all: no rank may "
    "`break` by a loss of its own. To evaluate on rank 0, call ddp_model.module.",
)
def collectives(traces):
    """collectives and forwards of the DDP model, compared before each begins"""
    if not any(trace.of("collective") for trace in traces):
        raise NotSeen("there was none")
    for group in {e.group for trace in traces for e in trace.of("collective")}:
        ranks = [r for r in range(len(traces)) if not group or r in group]
        reached = {
            r: [e for e in traces[r].of("collective") if e.group == group]
            for r in ranks
        }
        most = max(ranks, key=lambda rank: len(reached[rank]))
        done = [len(reached[rank]) for rank in ranks if traces[rank].finished]
        if done and len(reached[most]) > min(done):
            text = f"rank {most} reaches more collectives than others"
            return Finding(reached[most][-1].line, text)
    for event in (e for t in traces if t.finished for e in t.of("unwaited")):
        text = f"nothing waits for what {event.name}(async_op=True) returns"
        fix = "Call wait() of the returned Work before the result is used."
        return Finding(event.line, text, "warning", fix)
    return None


@check(
    "files",
    "one rank writes each file",
    fix="Write it within `if rank == 0`, or put the rank into its name.",
)
def files(traces):
    """files that are opened for writing or removed, and when ranks read them"""
    looks = written_twice, read_too_soon, own_folders
    findings = [finding for look in looks if (finding := look(traces))]
    if not (findings or any(paths_of(trace, *WRITES) for trace in traces)):
        raise NotSeen("no file was seen to be written")
    return worst(findings)


def paths_of(trace, *actions):
    """Return {path: the first event} of these actions."""
    events = [e for e in trace.of("file") if e.action in actions]
    return {event.path: event for event in reversed(events)}


def written_twice(traces):
    by_rank = [paths_of(trace, *WRITES) for trace in traces]
    removed = [paths_of(trace, "remove tree") for trace in traces]
    for path, event in sorted((p, e) for its in removed[:1] for p, e in its.items()):
        if all(path in its for its in removed):
            text = f"{len(traces)} ranks remove {Path(path).name}"
            return Finding(event.line, text, fix="Remove it within `if rank == 0`.")
    mild = None
    for path in sorted({path for its in by_rank for path in its}):
        events = [its[path] for its in by_rank if path in its]
        nodes = {event.file for event in events}  # each node may have its own disk
        if len(events) < 2 or None in nodes or len(nodes) > 1:
            continue
        kinds = {e.action for t in traces for e in t.of("file") if e.path == path}
        name = Path(path).name
        if "events" in kinds:
            name = f"TensorBoard's events in {name}/"
        text = f"{len(events)} ranks write {name}"
        if kinds & {"write", "rename"} and not events[0].empty:
            return Finding(events[0].line, text)
        mild = mild or Finding(events[0].line, text, "warning")
    return mild


def read_too_soon(traces):
    """Return a warning about a file that one rank may read before it is written."""
    for (a, writer), (b, reader) in permutations(enumerate(traces), 2):
        writes = [e for e in writer.of("file") if e.action in ("write", "append")]
        reads = [e for e in reader.of("file") if e.action == "read"]
        for write in writes:
            for read in reads:
                together = read.collectives == write.collectives
                if read.path == write.path and together:
                    text = f"rank {b} reads {Path(read.path).name}, which rank {a} "
                    text += f"writes at {write.line}; no collective is in between, "
                    text += "for which both wait"
                    fix = "Call dist.barrier() between the writing and the reading."
                    return Finding(read.line, text, "warning", fix)
    return None


def own_folders(traces):
    """Return a warning about a folder that each rank names by a clock or at random.

    Names with the ranks' numbers are intended, and so are temporary folders.
    """
    made = [paths_of(trace, "make") for trace in traces]
    for rank in range(1, len(traces)):
        mine, theirs = (
            {
                (event.line, Path(path).parent): path
                for path, event in one.items()
                if path not in other
            }
            for one, other in permutations([made[0], made[rank]])
        )
        for line, parent in mine.keys() & theirs.keys():
            one, two = mine[line, parent], theirs[line, parent]
            by_number = re.sub(r"\d+", "", one) == re.sub(r"\d+", "", two)
            by_clock = CLOCK.sub("", one) == CLOCK.sub("", two)
            if str(parent) != gettempdir() and (by_clock or not by_number):
                text = f"rank 0 makes the folder {Path(one).name}, and rank {rank} "
                text += f"makes {Path(two).name}"
                fix = "Broadcast rank 0's name by dist.broadcast_object_list()."
                return Finding(line, text, "warning", fix)
    return None


@check(
    "own-number",
    "printed numbers are the whole job's",
    fix="Add up sums and counts of all ranks with dist.all_reduce() first.",
)
def own_number(traces):
    """what rank 0 prints or logs in TensorBoard, and the tensors that it read"""
    if have_parts(traces):
        raise NotSeen("ranks that share a model may share a batch")
    finding = read_elsewhere(traces) or unreduced(traces)
    if not traces[0].of("print") and not finding:
        raise NotSeen("no number of a tensor was read and printed after a loop")
    read = [{e.source: e.numbers for e in trace.of("read")} for trace in traces]
    own, compared = own_readings(traces, read)
    groups = loops_of_all(traces, False)
    alone = {loops[0].key for _, loops, _ in groups if len(loops) < len(traces)}
    sources = {source for e in traces[0].of("print") for source in e.sources}
    loops_seen = Counter(source[:2] for source in sources)
    why = "" if compared else "no printed number could be compared"
    for line, reading, values in own:
        place = reading.source[:2]
        same_place = [r for _, r, _ in own if r.source[:2] == place]
        often = 2 * len({r.source for r in same_place}) >= loops_seen[place]
        matches = len({r.text for r in same_place})
        if place[1] in alone:
            why = "what one rank evaluates alone cannot be compared"
        elif not often or may_be_chance(read[0], reading, matches):
            why = why or "a number may be equal by chance"
        elif reading.evaluates is None and None in values:
            why = "what one rank reads without a DataLoader cannot be compared"
        else:
            part = "part of the evaluation" if reading.evaluates else "number"
            text = (
                f"{reading.text} is rank 0's own {part}, read at {reading.source[0]}"
            )
            if None not in values:
                parts = (f"rank {rank}: {v:.6g}" for rank, v in enumerate(values))
                text += f" ({', '.join(parts)})"
            if reading.evaluates:
                return Finding(line, text)
            finding = finding or Finding(line, text, "warning")
    if why and not finding:
        raise NotSeen(why)
    return finding


def own_readings(traces, read):
    """Return the numbers that are rank 0's own, and whether any was of all ranks.

    Such a number is (line, reading, values of all ranks). An output replaces an
    earlier one of the same name. In one line, the number of all ranks may stand
    beside rank 0's, as in "loss: 2.07 (2.11)".
    """
    shared, own = set(), []
    for event in reversed(traces[0].of("print")):
        values = [values_of_all(read, reading) for reading in event.readings]
        output = [*zip(event.readings, values, strict=True)]
        of_all = [reading for reading, its in output if is_shared(reading, its)]
        words = [reading.words for reading in of_all]
        own += [
            (event.line, reading, its)
            for reading, its in output
            if reading.words not in words and not reading.names & shared
        ]
        shared = shared.union(*(reading.names for reading in of_all))
    return own[::-1], bool(shared)


def values_of_all(read, reading):
    """Return the formula's value for every rank's readings, None if unknown."""
    found = []
    for own in read:
        values = own.get(reading.source, [])
        same = len(values) == len(read[0][reading.source])
        # Without `same`, this rank has another number of batches: take all of them.
        values = values[reading.start : reading.stop if same else None]
        value = compute(reading.formula, values, reading.sizes)
        unknown = value is None or (reading.reduced and not same)
        found.append(None if unknown else reading.factor * value)
    return found


def is_shared(reading, values):
    """Return whether the number is the same on all ranks, or was reduced to one."""
    if None in values:
        return bool(reading.reduced or reading.gathers)
    decimals = len(reading.text.partition(".")[2])
    alike = max(values) - min(values) < 0.1**decimals
    return alike or reading.reduced == "on one rank"


def may_be_chance(read, reading, matches):
    """Return whether a number may be equal by chance.

    A count of few samples takes few values, and a number from gathered samples may
    be the whole job's, so several different numbers have to match.
    """
    values = read[reading.source][reading.start : reading.stop]
    counts = all(value % 1 == 0 for value in values)
    few = counts and sum(reading.sizes) < FEW
    return matches < (3 if few else 2 if reading.gathers else 1)


def read_elsewhere(traces):
    """Return a warning about a number that was reduced to another rank."""
    for rank, trace in enumerate(traces):
        for event in trace.of("one rank's"):
            text = (
                f"rank {rank} reads what was reduced to rank {event.rank} alone at "
            )
            fix = "Use dist.all_reduce(), or read it on that rank alone."
            return Finding(event.line, f"{text}{event.reduced_at}", "warning", fix)
    return None


def unreduced(traces):
    """Return a warning if each rank evaluates a part, and nothing is reduced.

    A loop may only show samples, after the results of another loop were reduced.
    """
    loops = [e for t in traces for e in t.of("loop") if e.has_items and not e.trains]
    reduced = {e.first for e in loops if e.reduced}
    for _, loops, _ in loops_of_all(traces, False):
        first = loops[0]
        apart = len({frozenset(e.items) for e in loops}) == len(traces)
        if apart and first.printed and first.first not in reduced:
            text = (
                "a result is printed here, while each rank saw a part in the loop "
            )
            text += f"at {first.line}, and no all_reduce() followed"
            return Finding(first.printed, text, "warning")
    return None
