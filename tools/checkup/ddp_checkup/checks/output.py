"""Checks of collectives, of files and of printed numbers."""

import re
from collections import Counter
from itertools import permutations
from pathlib import Path
from tempfile import gettempdir

from ddp_checkup.checks.loops import loops
from ddp_checkup.checks.ranks import have_parts, no_steps
from ddp_checkup.checks.sums import sums_as_means
from ddp_checkup.checks.verdicts import OK, check, found, unseen
from ddp_checkup.formulas import compute, shows

FEW = 50  # samples of a rank, whose share of hits may be another's by chance
# A date and a time of day, a time of day, or seconds since 1970; and their fractions
CLOCK = re.compile(r"(\d{8}\D?\d{4,6}|\d\d\D\d\d\D\d\d|\d{10})(\D?\d+)*")


@check(
    "all ranks take part in each collective",
    seen="collectives and forwards of the DDP model, compared before each begins",
    fix="Call it on all ranks, and make equally many steps on all: no rank may "
    "`break` by a loss of its own. To evaluate on rank 0, call ddp_model.module.",
)
def collectives(ranks):
    for members in {m for r in ranks for m in r.counts}:
        group = [r for r in ranks if not members or r.rank in members]
        done = [r.counts[members] for r in group if r.done]
        most = max(group, key=lambda r: r.counts[members])
        if done and most.counts[members] > min(done):
            text = f"rank {most.rank} reaches more collectives than others"
            return found(f"{most.last[members]}: {text}")
    for line, name in (note for r in ranks if r.done for note in r.unwaited):
        text = f"nothing waits for what {name}(async_op=True) returns"
        fix = "Call wait() of the returned Work before the result is used."
        return found(f"{line}: {text}", "warning", fix)
    return OK if any(r.counts for r in ranks) else unseen("there was none")


@check(
    "one rank writes each file",
    seen="files that Python or an exporter of PyTorch opens for writing, and when "
    "other ranks read them",
    fix="Write it within `if rank == 0`, or put the rank into its name.",
)
def files(ranks):
    all_files = {file for r in ranks for file in r.files}
    verdict = OK if all_files else unseen("no file was seen to be written")
    for file in sorted(all_files):
        writes = [r.files[file] for r in ranks if file in r.files]
        if len(writes) > 1:
            kinds, name = {kind for _, kind in writes}, Path(file[0]).name
            if "events" in kinds:
                name = f"TensorBoard's events in {name}/"
            text = f"{writes[0][0]}: {len(writes)} ranks write {name}"
            if "new" in kinds:
                return found(text)
            verdict = found(text, "warning")
    others = done_twice, read_too_soon, own_folders
    return next(filter(None, (look(ranks) for look in others)), verdict)


def done_twice(ranks):
    """Return an error about what another rank has made or removed, or not yet."""
    for r in ranks:
        line, path = r.failed_at or ("", "")
        folder = str(Path(path).parent)
        for other in [other for other in ranks if other is not r]:
            text = f"{line}: rank {r.rank} fails, because another rank has"
            if path in other.folders and path in r.folders:
                fix = "Make it with exist_ok=True, or on rank 0 before a barrier."
                return found(f"{text} made {Path(path).name}", fix=fix)
            if path in other.removed & r.removed:
                fix = "Remove it within `if rank == 0`."
                return found(f"{text} removed {Path(path).name}", fix=fix)
            if folder in other.folders and folder not in r.folders:
                fix = "Make it on all ranks with exist_ok=True."
                text = f"{line}: rank {r.rank} fails, because only rank {other.rank}"
                return found(f"{text} makes the folder {Path(folder).name}", fix=fix)
    return None


def own_folders(ranks):
    """Return a warning about a folder that each rank names by a clock or at random.

    Names with the ranks' numbers are meant so, and temporary folders are as well.
    """
    for r in ranks[1:]:
        mine, theirs = (
            {
                (line, Path(path).parent): path
                for path, line in made.items()
                if path not in others
            }
            for made, others in permutations([ranks[0].folders, r.folders])
        )
        for line, parent in mine.keys() & theirs.keys():
            one, two = mine[line, parent], theirs[line, parent]
            by_number = re.sub(r"\d+", "", one) == re.sub(r"\d+", "", two)
            by_clock = CLOCK.sub("", one) == CLOCK.sub("", two)
            if str(parent) != gettempdir() and (by_clock or not by_number):
                text = f"{line}: rank 0 makes the folder {Path(one).name}, and rank "
                text += f"{r.rank} makes {Path(two).name}"
                fix = "Broadcast rank 0's name by dist.broadcast_object_list()."
                return found(text, "warning", fix)
    return None


def read_too_soon(ranks):
    """Return a warning about a file that one rank may read before it is written."""
    for writer, reader in permutations(ranks, 2):
        for path in writer.writes.keys() & reader.reads.keys():
            written, read = writer.writes[path], reader.reads[path]
            for number in written.keys() & read.keys():
                text = f"rank {reader.rank} reads {Path(path).name}, which rank "
                text += f"{writer.rank} writes at {written[number]}; no collective "
                text += "is in between, for which both wait"
                fix = "Call dist.barrier() between the writing and the reading."
                return found(f"{read[number]}: {text}", "warning", fix)
    return None


@check(
    "printed numbers are the whole job's",
    seen="what rank 0 prints or logs in TensorBoard, the tensors that it read, and "
    "the variables of all ranks after evaluations",
    fix="Add up sums and counts of all ranks with dist.all_reduce() first.",
)
def own_number(ranks):
    if have_parts(ranks):
        return unseen("ranks that share a model may share a batch")
    warning = sums_as_means(ranks)
    if warning is OK:
        warning = unreduced(ranks)
    if warning is OK:
        warning = own_variable(ranks)
    if not ranks[0].prints and warning is OK:
        return unseen("no number of a tensor was read and printed after a loop")
    alone = {g[0].key for _, _, g, _ in loops(ranks, False) if len(g) < len(ranks)}
    shared, own, compared, undecided = set(), [], False, ""
    for line, readings in reversed(ranks[0].prints):
        values = [values_of_all(ranks, reading) for reading in readings]
        output = [*zip(readings, values, strict=True)]
        of_all = [reading for reading, its in output if is_shared(reading, its)]
        compared = compared or bool(of_all)
        words = [reading.words for reading in of_all]  # "loss: 2.07 (2.11)"
        for reading, its in output:
            if reading.words not in words and not reading.names & shared:
                own.append((line, reading, its))
        shared = shared.union(*(reading.names for reading in of_all))
    loops_seen = Counter(source[:2] for source in ranks[0].available)
    for line, reading, values in reversed(own):
        place = reading.source[:2]
        texts = {r.text for _, r, _ in own if r.source[:2] == place}
        loops_matched = {r.source for _, r, _ in own if r.source[:2] == place}
        often = 2 * len(loops_matched) >= loops_seen[place]
        if place[1] in alone:
            undecided = "what one rank evaluates alone cannot be compared"
            continue
        if not often or may_be_chance(ranks, reading, len(texts)):
            undecided = undecided or "a number may be equal by chance"
            continue
        if reading.evaluates is None and None in values:
            undecided = "what one rank reads without a DataLoader cannot be compared"
            continue
        reason = "its own part of the evaluation" if reading.evaluates else "its own"
        if None not in values:
            all_values = (f"rank {r}: {v:.6g}" for r, v in enumerate(values))
            reason += f" ({', '.join(all_values)})"
        text = f"{line}: {reading.text} is what rank 0 read at {reading.source[0]}"
        if reading.evaluates:
            return found(f"{text}: {reason}")
        if warning is OK:
            warning = found(f"{text}: {reason}", "warning")
    if warning is not OK:
        return warning
    if undecided or not compared:
        return unseen(undecided or "no printed number could be compared")
    return OK


def may_be_chance(ranks, reading, matches):
    """Return whether a number of few samples, or of gathered ones, may be another's.

    A count of few samples takes few values, and what is computed from gathered
    samples is the job's: several matches are needed.

    matches: how many different numbers matched.
    """
    values = ranks[0].read[reading.source][reading.start : reading.stop]
    counts = all(value % 1 == 0 for value in values)
    few = counts and sum(reading.sizes) < FEW
    return matches < (3 if few else 2 if reading.gathers else 1)


def unreduced(ranks):
    """Return a warning if each rank evaluates a part, and nothing is reduced.

    One loop may show samples, say, after another's results were reduced.
    """
    evaluations = [e for r in ranks for e in r.epochs if not e.trains]
    reduced = {e.first for e in evaluations if e.reduced}
    for line, _, group, _ in loops(ranks, False):
        apart = len({frozenset(e.items) for e in group}) == len(ranks)
        if apart and group[0].printed and group[0].first not in reduced:
            text = f"each rank evaluates a part at {line}, and nothing is reduced"
            return found(f"{group[0].printed}: {text}", "warning")
    return OK


def own_variable(ranks):
    """Return a warning if rank 0 prints a variable of its own after evaluations.

    Ranks that evaluate a part each come to different numbers, which change from one
    evaluation to the next; those that leave it to rank 0 keep what they had.
    """
    evaluations = [group for _, _, group, _ in loops(ranks, False)]
    apart = [
        len({frozenset(e.items) for e in group}) == len(ranks)
        for group in evaluations
    ]
    merged = any(r.to_one for r in ranks) or any(r.files for r in ranks[1:])
    # Without a DataLoader nobody knows what a rank evaluates.
    if merged or (apart and not any(apart)):
        return OK
    before = {}
    for moment, shown in ranks[0].shown.items():
        of_all = [r.moments.get(moment, {}) for r in ranks]
        values = {
            key: [its[key] for its in of_all]
            for key in shown
            if all(key in its for its in of_all)
        }
        of_job = {
            shown[key][1] for key in values if is_alike(shown[key][1], values[key])
        }
        for key, numbers in values.items():
            line, text = shown[key]
            old = before.get(key, numbers)
            changed = all(a != b for a, b in zip(old, numbers, strict=True))
            if text not in of_job:
                before[key] = numbers
                if changed:
                    others = (f"rank {r}: {n:.6g}" for r, n in enumerate(numbers))
                    what = f"is a number of rank 0 alone ({', '.join(others)})"
                    return found(f"{line}: {text} {what}", "warning")
    return OK


def is_alike(text, values):
    """Return whether all ranks would print this text."""
    return all(shows(text, v) or shows(text, 100 * v) for v in values)


def values_of_all(ranks, reading):
    """Return what each rank's readings come to by the same formula, None if none."""
    found_by_rank = []
    for r in ranks:
        values = r.read.get(reading.source, [])
        same = len(values) == len(ranks[0].read[reading.source])
        values = values[reading.start : reading.stop if same else None]
        value = compute(reading.formula, values, reading.sizes)
        # Ranks may have different numbers of batches, or of numbers to read.
        unknown = value is None or (reading.reduced and not same)
        found_by_rank.append(None if unknown else reading.factor * value)
    return found_by_rank


def is_shared(reading, values):
    """Return whether all ranks have the number, or one has it from all."""
    if None in values:
        return bool(reading.reduced or reading.gathers)
    decimals = len(reading.text.partition(".")[2])
    alike = max(values) - min(values) < 0.1**decimals
    return alike or reading.reduced == "on one rank"


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
                text = f"rank {r.rank} waits for a number of the device"
                many = f"in {steps} of {r.trained} batches"
                return found(f"{line}: {text} {many}")
    few = any(r.trained < 3 for r in ranks)
    return unseen(no_steps(ranks) or "too few steps") if few else OK
