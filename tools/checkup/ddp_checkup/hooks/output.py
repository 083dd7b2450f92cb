"""Numbers that are read from tensors and printed, and files that are written."""

import os
import re
import sys
from collections import defaultdict

import torch
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader

from ddp_checkup.hooks.shared import wrap
from ddp_checkup.record import HERE, is_library, record, state, user_line

HOST_SYNCS = ["item", "tolist", "cpu", "numpy"]
HOST_SYNCS += ["__float__", "__int__", "__bool__", "__format__"]
# What lies between a hook and its caller; the second one if torch.compile is used.
HOOK_FILES = HERE, "/torch/_dynamo/eval_frame.py"
CACHES = "/__pycache__/", "/.cache/", "/.triton/", "/torchinductor", ".lock"
MAX_NUMBERS = 1000  # of each line
# A line says whose numbers it has.
RANK_0 = r"(rank|gpu|process|worker)\W*0(?![\d.])"
NUMBER = r"(?<![\w.])\d+\.\d+|(?<![\w.])\d{3,}(?![\w.])"


def reset():
    record.read = defaultdict(list)  # by line: numbers of tensors
    record.syncs = defaultdict(set)  # by line: batches in which it waits
    record.prints, record.reduced = {}, False  # rank 0's own numbers in its output
    record.files = {}  # by path: (line, whether all only appended)
    # What was read since the last output: own, sums over ranks, other reduced ones.
    state.numbers = {kind: defaultdict(list) for kind in ("own", "sum", "reduced")}
    state.lines, state.partial = [], ""  # what this rank has printed


def after_read(result, values):
    caller, loop, tensor = sys._getframe(1), state.epoch, values[0]
    while any(file in caller.f_code.co_filename for file in HOOK_FILES):
        caller = caller.f_back
    if is_library(caller.f_code.co_filename):
        return
    computed = tensor.requires_grad or state.forward_batch == state.batch
    if tensor.device.type != "cpu" or (computed and record.device in (None, "cpu")):
        record.syncs[user_line()].add(state.batch)
    if isinstance(result, str) and tensor.numel() == 1:  # f"{loss:.3f}"
        result = torch.Tensor.tolist(tensor)
    if not isinstance(result, int | float | list) or isinstance(result, bool):
        return
    numbers = [v for v in tree_leaves(result) if isinstance(v, int | float)]
    if not loop and torch.is_grad_enabled():
        return
    line, evaluates = user_line(), not loop.steps if loop else None
    if len(record.read[line]) < MAX_NUMBERS:
        record.read[line] += numbers[:MAX_NUMBERS]
    kind = "reduced" if state.reduced else "own"
    kind = "sum" if is_sum_of_means(tensor) else kind
    record.reduced = record.reduced or kind == "reduced"
    state.numbers[kind][line, loop.key if evaluates else "", evaluates] += numbers


def is_sum_of_means(tensor):
    """Return whether this is a sum over ranks of their losses, and not divided."""
    own = own_numbers("own", state.epoch)
    for summed, version, given, loss in state.summed:
        if summed is tensor and tensor._version == version:
            value = torch.Tensor.item(given)  # the script has just waited
            is_loss = loss is not None and value == torch.Tensor.item(loss)
            return is_loss or any(abs(value - number) < 1e-6 for number in own)
    return False


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
            if not re.search(RANK_0, line, re.IGNORECASE):
                note_numbers(re.findall(NUMBER, line))
        return count


def before_scalar(name, values):
    for value in tree_leaves(values[1:]):
        if isinstance(value, float):
            note_numbers([repr(value)])


def note_numbers(texts):
    """Compare the numbers of a line of output with those that this rank has read."""
    loop = state.epoch
    # Shorter ones are often the same by chance.
    texts = [t for t in texts if len(t.replace(".", "").lstrip("0")) >= 3]
    if not texts or (loop and not (loop.exhausted or loop.batches >= loop.length)):
        return  # in the middle of an epoch a rank may print its own loss
    reduced = own_numbers("reduced", loop)
    texts = [text for text in texts if not found_in([text], reduced)]
    for kind in ("own", "sum"):
        for (line, key, evaluates), values in state.numbers[kind].items():
            old = record.prints.get((kind, line, key), ["", 0, 0, evaluates])
            printed = found_in(texts, candidates(values, loop, kind))
            if printed:
                old[0] = f"{user_line()}: {printed} is what rank 0 read at {line}"
            old[1:3] = old[1] + bool(printed), old[2] + 1
            record.prints[kind, line, key] = old
    for numbers in state.numbers.values():
        numbers.clear()


def own_numbers(kind, loop):
    read = state.numbers[kind].values()
    return [number for values in read for number in candidates(values, loop, "own")]


def candidates(values, loop, kind):
    """Return the numbers that a script may compute from those it has read."""
    last, before, total = values[-1], values[-2:][0], sum(values)
    if kind == "sum":
        return [last, total / len(values)]
    if loop is None:
        return [f * v for v in (last, total / len(values)) for f in (1, 100)]
    samples = sum(len(b) for b in loop.dealt if hasattr(b, "__len__"))
    own = len(loop.subsets[0]) if loop.subsets else loop.base_length
    found = [last, total / len(values), before / (last or 1)]
    for count in {samples, own, loop.base_length, loop.batches} - {0}:
        found += [total / count, last / count]
    return [factor * value for value in found for factor in (1, 100)]


def found_in(texts, numbers):
    """Return the first text that is one of these numbers."""
    for text in texts:
        decimals = len(text.partition(".")[2])
        for number in numbers:
            if text in (repr(number), f"{number:.{decimals}f}"):
                return text
    return ""


def audit(event, arguments):
    if event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR):
        note_file(arguments[0], append=bool(arguments[2] & os.O_APPEND))
    elif event == "os.rename":
        note_file(arguments[1])


def before_save(name, values):
    note_file(*[v for v in values if isinstance(v, str | os.PathLike)][:1])


def note_file(path=None, append=False):
    if not isinstance(path, str | os.PathLike):
        return
    path = os.path.abspath(path)
    ignored = path.startswith(("/dev/", "/proc/"))
    if not ignored and not any(cache in path for cache in CACHES):
        line, only_appended = record.files.get(path, (None, True))
        record.files[path] = line or user_line(), only_appended and append


def wrap_late_imports(*_):
    """Wrap what a script may have imported since."""
    for name, owner, method in (
        ("torch.utils.tensorboard.writer", "SummaryWriter", "add_scalar"),
        ("wandb.sdk.wandb_run", "Run", "log"),
    ):
        owner = getattr(sys.modules.get(name), owner, None)
        if owner and not hasattr(getattr(owner, method), "__wrapped__"):
            wrap(owner, method, before=before_scalar)


def install():
    for name in HOST_SYNCS:
        wrap(torch.Tensor, name, after=after_read)
    wrap(torch, "save", before=before_save)
    wrap(DataLoader, "__iter__", before=wrap_late_imports)
    sys.addaudithook(audit)
