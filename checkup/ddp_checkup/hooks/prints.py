"""Numbers that are read from tensors, and those that are printed or logged.

read         source (line that reads, key and number of the loop), numbers
totals       whole numbers of three digits or more that were printed
print        an output after a loop: sources (what was read since the last output)
             and readings, each a number of the output that one source explains:

    text         the number as printed; factor: 100 for a percentage
    source       the numbers numbers[start:stop] of this source explain it
    formula      how they explain it (formulas.py); sizes: of the loop's batches
    names, words names by which later outputs replace it, and the words before it
    reduced      where the numbers were reduced, or ""
    gathers      whether anything was reduced since the loop began
    evaluates    whether the loop made no optimizer step; None: no loop
"""

import re
from collections import defaultdict
from itertools import product

import torch
from torch.utils._pytree import tree_leaves

from ddp_checkup.hooks import collectives, late, loops, modules
from ddp_checkup.hooks.checksums import has_bits, is_dtensor
from ddp_checkup.hooks.formulas import compute, formulas, shows
from ddp_checkup.hooks.wrapping import file_of_caller, wrap
from ddp_checkup.trace import Event, is_library, trace, user_line

READS = "item", "tolist", "__float__", "__int__", "__format__"
MAX_NUMBERS = 20_000  # per line that reads them
MAX_OUTPUTS = 1000
# Lines about rank 0 alone are skipped, and progress bars, which show no result.
SKIPPED = re.compile(r"(rank|gpu|process|worker)\W*0(?![\d.])|\d%\|", re.IGNORECASE)
# Dates and times of day, with parts of seconds: 2026-11-26 12:00:00,022
TIME = re.compile(
    r"\b\d{1,4}([-/.])\d{1,2}\1\d{1,4}\b|\b\d+:\d\d(:\d\d)?([.,]\d+)?\b"
)
NUMBER = re.compile(r"(?<![\w.])-?(?:\d+\.\d+|\d{3,}(?![\d.%]))(?![\w.])")
# Functions with such names print for their callers.
PRINTERS = re.compile("print|log|write|info", re.IGNORECASE)


def reset():
    global read, fresh, lines, partial, totals
    read = defaultdict(list)  # by source: all numbers
    fresh = {}  # by source: (start, reduced, loop), since the last output
    lines, partial = [], ""  # what this rank has printed
    totals = set()  # whole numbers in those lines


def is_evaluating():
    """Return whether a model was switched to eval() since the last step."""
    return any(entry.evaluated == trace.step for entry in modules.seen.values())


def after_read(result, values):
    loop, tensor = trace.loop, values[0]
    if is_library(file_of_caller()) or loops.loading or is_dtensor(tensor):
        return
    place, reduced = place_of(tensor), collectives.where_reduced()
    trained = next((e for e in reversed(trace.of("loop")) if e.steps), None)
    if tensor.requires_grad and trained and trained is not loop:
        loop = trained  # this loss is read after another loop
        reduced = reduced if place in collectives.reduced_storages else ""
    if place in collectives.to_other_rank:
        _, rank, line = collectives.to_other_rank.pop(place)
        trace.add("one rank's", line=user_line(), rank=rank, reduced_at=line)
    if isinstance(result, str) and tensor.numel() == 1:  # f"{loss:.3f}"
        result = torch.Tensor.tolist(tensor)
    if not isinstance(result, int | float | list) or isinstance(result, bool):
        return
    numbers = [v for v in tree_leaves(result) if isinstance(v, int | float)]
    if not loop and torch.is_grad_enabled() and not is_evaluating():
        return
    source = (user_line(), *((loop.key, loop.number) if loop else ("", 0)))
    if len(read[source]) < MAX_NUMBERS:
        for old in [s for s in fresh if s[:2] == source[:2] and s != source]:
            del fresh[old]  # it was read in an earlier epoch
        start = fresh.get(source, [len(read[source])])[0]
        fresh[source] = start, reduced, loop
        read[source] += numbers


def place_of(tensor):
    return tensor.untyped_storage().data_ptr() if has_bits(tensor) else None


class Tee:
    """A stream that replaces sys.stdout or sys.stderr, and notes their lines."""

    def __init__(self, stream):
        self.stream = stream

    def __getattr__(self, name):
        return getattr(self.stream, name)

    def write(self, text):
        global partial
        count = self.stream.write(text)
        trace.activity += 1
        partial += text
        *whole, partial = re.split("[\r\n]", partial[-2000:])
        lines.extend(whole)
        for line in whole:
            if not SKIPPED.search(line):
                note_line(TIME.sub(" ", line))
        return count


def note_line(line):
    if re.search(r"\d", line):
        note_output()
    numbers = [(line[: m.start()], m[0]) for m in NUMBER.finditer(line)]
    note_numbers(numbers)


def note_output():
    """Note the line that prints first after the loops that have just ended."""
    loop = trace.loop
    if loop and not loops.is_running(loop):
        for each in reversed(trace.of("loop")):
            if each.last != trace.step:
                break
            each.printed = each.printed or user_line(skip=PRINTERS)


def before_scalar(name, values):
    if isinstance(values[2], float):
        note_numbers([(values[1], repr(values[2]))])


def note_numbers(numbers):
    """Note an output that may be computed from what this rank has read.

    numbers: [(the text before it, number)].
    """
    loop = trace.loop
    totals.update(int(text) for _, text in numbers if text.isdigit())
    # Shorter numbers are often equal by chance.
    numbers = [n for n in numbers if len(n[1].strip("-0.").replace(".", "")) >= 3]
    if not numbers or (loop and loops.is_running(loop)):
        return  # in the middle of an epoch a rank may print its own loss
    line = user_line(skip=PRINTERS)
    if fresh and len(trace.of("print")) < MAX_OUTPUTS:
        found = [reading_of(source, numbers) for source in fresh]
        found = [reading for reading in found if reading]
        trace.add("print", line=line, sources=[*fresh], readings=found)
        if not loop:
            fresh.clear()


def reading_of(source, numbers):
    """Return how a number of an output may be computed from a source, or None."""
    start, reduced, loop = fresh[source]
    values, sizes = read[source][start:], loop.sizes if loop else []
    for formula in formulas(values, loop, reduced):
        value = compute(formula, values, sizes)
        for (before, text), factor in product(numbers, (1, 100)):
            if value and shows(text, factor * value):
                words = re.findall("[a-z]+", before.lower())
                begun = len(trace.of("loop"))
                return Event(
                    source=source,
                    start=start,
                    stop=start + len(values),
                    sizes=[*sizes],
                    formula=formula,
                    factor=factor,
                    text=text,
                    words=words,
                    names={(begun, name) for name in (text, *words[-1:])},
                    reduced=reduced,
                    gathers=loop.reduced if loop else False,
                    evaluates=not loop.steps if loop else None,
                )
    return None


def finish():
    trace.add("totals", totals=totals)
    for source, numbers in read.items():
        trace.add("read", source=source, numbers=numbers)


def install():
    for name in READS:
        wrap(torch.Tensor, name, after=after_read)
    writer = "torch.utils.tensorboard.writer", "SummaryWriter.add_scalar"
    late.wrap_when_imported(*writer, before=before_scalar)
