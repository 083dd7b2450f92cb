"""Numbers that are read from tensors, and those that are printed."""

import re
import sys
from collections import defaultdict
from itertools import chain, product
from types import SimpleNamespace

import torch
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader

from ddp_checkup.formulas import ACCURACY, batch_sizes, compute, formulas, shows
from ddp_checkup.hooks.shared import file_of_caller, wrap
from ddp_checkup.hooks.variables import note_text
from ddp_checkup.record import is_library, record, state, user_line

HOST_SYNCS = ["item", "tolist", "cpu", "numpy"]
HOST_SYNCS += ["__float__", "__int__", "__bool__", "__format__"]
MAX_NUMBERS = 20_000  # of each line that reads them
MAX_OUTPUTS = 1000  # lines and scalars
# A line says whose numbers it has; a progress bar is not the loop's result.
SKIPPED = re.compile(r"(rank|gpu|process|worker)\W*0(?![\d.])|\d%\|", re.IGNORECASE)
# Dates and times of day, with parts of seconds: 2026-11-26 12:00:00,022
TIME = re.compile(
    r"\b\d{1,4}([-/.])\d{1,2}\1\d{1,4}\b|\b\d+:\d\d(:\d\d)?([.,]\d+)?\b"
)
NUMBER = re.compile(r"(?<![\w.])(?:\d+\.\d+|\d{3,}(?![\d.%]))(?![\w.])")
# Totals of two digits, which other numbers may equal, stand beside such words.
KINDS = "num|count|total|samples|examples|images"
TOTAL = re.compile(
    rf"(?:{KINDS})\w*\W{{1,4}}(\d\d)(?![\w.%])|(?<![\w.])(\d\d) (?:{KINDS})",
    re.IGNORECASE,
)
PRINTERS = re.compile("print|log|write|info", re.IGNORECASE)  # for their callers


def reset():
    record.read = defaultdict(list)  # by (line, loop, its number): what was read
    record.syncs = defaultdict(set)  # by line: batches in which it waits
    record.prints = []  # outputs after a loop, with what was read before
    record.available = set()  # the keys of what was read before outputs
    record.outputs = []  # after sums: (line, text before, number, sums so far)
    record.totals = set()  # whole numbers in the output
    record.accuracies = set()  # numbers after that word, as texts
    state.numbers = {}  # by (line, loop): what was read since the last output
    state.lines, state.partial = [], ""  # what this rank has printed


def after_read(result, values):
    loop, tensor = state.epoch, values[0]
    if is_library(file_of_caller()) or state.loading:
        return
    reduced = state.reduced
    plain = not isinstance(tensor, DTensor)
    if plain and tensor.requires_grad and state.train_loop not in (None, loop):
        loop = state.train_loop  # a loss, which is read after another loop
        storage = tensor.untyped_storage().data_ptr()
        reduced = reduced if storage in state.reduced_storages else False
    computed = tensor.requires_grad or state.forward_batch == state.batch
    if tensor.device.type != "cpu" or (computed and record.device in (None, "cpu")):
        record.syncs[user_line()].add(state.batch)
    if isinstance(result, str) and tensor.numel() == 1:  # f"{loss:.3f}"
        result = torch.Tensor.tolist(tensor)
    if not isinstance(result, int | float | list) or isinstance(result, bool):
        return
    numbers = [v for v in tree_leaves(result) if isinstance(v, int | float)]
    if not loop and torch.is_grad_enabled() and not is_evaluating():
        return
    source = (user_line(), *((loop.key, loop.number) if loop else ("", 0)))
    read = record.read[source]
    if len(read) < MAX_NUMBERS:
        for old in [s for s in state.numbers if s[:2] == source[:2] and s != source]:
            del state.numbers[old]  # of an earlier epoch
        start = state.numbers.get(source, [len(read)])[0]
        state.numbers[source] = start, reduced, loop
        read += numbers


def is_evaluating():
    """Return whether a model was switched to eval() since the last step."""
    return any(steps == state.steps for *_, steps in state.modules.values())


class Tee:
    """sys.stdout or sys.stderr, whose lines are looked at."""

    def __init__(self, stream):
        self.stream = stream

    def __getattr__(self, name):
        return getattr(self.stream, name)

    def write(self, text):
        count = self.stream.write(text)
        state.events += 1
        state.partial += text
        *lines, state.partial = re.split("[\r\n]", state.partial[-2000:])
        state.lines += lines
        for line in lines:
            if not SKIPPED.search(line):
                line = TIME.sub(" ", line)
                totals = [*chain(*TOTAL.findall(line))]
                record.totals |= {int(text) for text in totals if text}
                numbers = NUMBER.finditer(line)
                note_numbers([(line[: m.start()], m[0]) for m in numbers])
        return count


def before_scalar(name, values):
    if isinstance(values[2], float):
        note_numbers([(values[1], repr(values[2]))])


def note_numbers(numbers):
    """Note an output that may be computed from what this rank has read.

    numbers: [(the text before it, number)].
    """
    loop = state.epoch
    record.totals |= {int(text) for _, text in numbers if text.isdigit()}
    if len(record.accuracies) < MAX_OUTPUTS:
        named = [text for before, text in numbers if ACCURACY.search(before)]
        record.accuracies |= {text for text in named if "." in text}
    # Shorter ones are often the same by chance.
    numbers = [n for n in numbers if len(n[1].replace(".", "").lstrip("0")) >= 3]
    if not numbers:
        return
    line, known = user_line(skip=PRINTERS), len(record.sums)
    for before, text in numbers:
        note_text(line, before, text)
    if known and len(record.outputs) < MAX_OUTPUTS:
        record.outputs += [(line, before, text, known) for before, text in numbers]
    if loop and not loop.exhausted and loop.iterator() is not None:
        return  # in the middle of an epoch a rank may print its own loss
    if loop:
        for each in reversed(record.epochs):
            if each.last != state.steps:
                break
            each.printed = each.printed or line
    if not state.numbers or len(record.prints) >= MAX_OUTPUTS:
        return
    readings = [find_match(source, numbers) for source in state.numbers]
    record.available |= state.numbers.keys()
    record.prints.append((line, [r for r in readings if r]))
    if not loop:
        state.numbers.clear()


def find_match(source, numbers):
    """Return which number of an output may be computed from a reading, and how."""
    start, reduced, loop = state.numbers[source]
    new = SimpleNamespace(source=source, reduced=reduced, start=start)
    values = record.read[source][start:]
    new.stop, new.sizes = start + len(values), batch_sizes(loop) if loop else []
    new.evaluates = not loop.steps if loop else None
    new.gathers = loop.reduced if loop else False  # since this loop began
    for new.formula in formulas(values, loop, reduced):
        value = compute(new.formula, values, new.sizes)
        for (before, new.text), new.factor in product(numbers, (1, 100)):
            if value and shows(new.text, new.factor * value):
                # Later outputs after the same loops replace those of the same name.
                new.words = re.findall("[a-z]+", before.lower())
                begun = state.begun.total()
                new.names = {(begun, name) for name in (new.text, *new.words[-1:])}
                return new
    return None


def wrap_tensorboard(*_):
    """Wrap what a script may have imported since."""
    writer = sys.modules.get("torch.utils.tensorboard.writer")
    if writer and not hasattr(writer.SummaryWriter.add_scalar, "__wrapped__"):
        wrap(writer.SummaryWriter, "add_scalar", before=before_scalar)


def install():
    for name in HOST_SYNCS:
        wrap(torch.Tensor, name, after=after_read)
    wrap(DataLoader, "__iter__", before=wrap_tensorboard)
