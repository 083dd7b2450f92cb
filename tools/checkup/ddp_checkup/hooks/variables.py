"""The variables of the script: metrics after an evaluation, and what numbers words.

A metric that each rank computes from its own part has another value on each rank,
whatever its formula is. All ranks note their variables when the next loop begins.
Vocabularies and names of classes are noted at the first step.
"""

import re
import sys
from collections import deque
from contextlib import suppress
from itertools import islice
from types import FunctionType, ModuleType

import torch.distributed as dist
from torch.nn import Module
from torch.utils.data import DataLoader

from ddp_checkup.formulas import shows
from ddp_checkup.hooks.shared import wrap
from ddp_checkup.record import record, state, user_frames, variables_of

MAX_NUMBERS = 500  # of one moment
MAX_MOMENTS = 50
MAX_PARTS = 50  # of a container
MAX_WORDS = 20  # letters before a number that may name it
# Of other numbers, such as times and memory, each rank has its own.
METRICS = (
    "acc|top|hit|err|m?iou|dice|score|psnr|ssim|recall|prec|f1|m?auc|m?ap|bleu|"
    "[wc]er|eer|min_?dcf|ppl|mrr|ndcg|r?mse|mae|corr|fid|kappa|mcc|epe|pck|r2"
)
METRIC = re.compile(rf"(?<![a-z])({METRICS})|loss|metric|perplex", re.IGNORECASE)
# A list of one of these names numbers what is in it; others may be in any order.
NUMBERED = re.compile(
    "vocab|itos|words|classes|labels|categories|(class|label)_?names"
)
MAX_NUMBERED = 2000  # entries of what is compared
MAX_OBJECTS = 2000  # looked at for what numbers words
MEASURED = re.compile(r"time|sec|\bms\b|speed|/s|per_s|[mg]i?b\b", re.IGNORECASE)


def reset():
    record.moments = {}  # by number of loops begun: {variable: number}
    record.shown = {}  # by the same: {variable: (line, text) that this rank printed}
    # By variable: {word or name: its number}, of dicts and lists that number strings
    record.numberings = {}
    state.texts = []  # numbers that were printed since the last moment


def note_text(line, before, text):
    if len(state.texts) < MAX_NUMBERS and not MEASURED.search(before):
        state.texts.append((line, text, bool(METRIC.search(before[-MAX_WORDS:]))))


def numbers_in(name, value, depth=2):
    """Yield (name, number) of a number, and of those that a container holds."""
    if MEASURED.search(name):
        return
    if isinstance(value, float):
        yield name, value
    elif depth:
        for part, each in parts_of(value)[-MAX_PARTS:]:  # the last of a history
            yield from numbers_in(name + part, each, depth - 1)


def parts_of(value):
    """Return [(how it is written after the container's name, a part of it)]."""
    if isinstance(value, dict):
        # The text of a key that is a tensor would be read from its GPU.
        names = [key for key in value if isinstance(key, str | int)]
        return [(f"[{key!r}]", value[key]) for key in names]
    if isinstance(value, list | tuple | deque):
        last = range(-min(len(value), MAX_PARTS), 0)
        return [(f"[{i}]", value[i]) for i in last]
    if isinstance(value, Module):
        return []
    attributes = getattr(value, "__dict__", {})
    return [(f".{name}", each) for name, each in attributes.items()]


def all_numbers(frame):
    """Yield (function and variable, number) of the script's functions that run."""
    for each in user_frames(frame):
        for name, value in [*variables_of(each).items()]:
            with suppress(Exception):  # of a container of the script's own
                for variable, number in numbers_in(name, value):
                    yield f"{each.f_code.co_name}: {variable}", number


def note_moment():
    """Note the variables after an evaluation that this rank has read to its end."""
    loop = record.epochs[-1] if record.epochs else None
    trained = not loop or loop.steps or loop.first < loop.last
    evaluated = not trained and loop.exhausted
    if evaluated or 0 < state.steps == state.evaluated_at:
        number = state.begun.total()
        if number not in record.moments and len(record.moments) < MAX_MOMENTS:
            found = dict(islice(all_numbers(sys._getframe(1)), MAX_NUMBERS))
            record.moments[number] = found
            record.shown[number] = {
                key: (line, text)
                for key, value in found.items()
                for line, text, named in state.texts
                if (named or METRIC.search(key))
                and (shows(text, value) or shows(text, 100 * value))
            }
    state.texts.clear()


def numbering(name, value):
    """Return {string: its number} if a dict or a list numbers strings, or {}."""
    if isinstance(value, list | tuple) and NUMBERED.search(name.lower()):
        value = {key: number for number, key in enumerate(value)}
    if not isinstance(value, dict) or not 2 < len(value) <= MAX_NUMBERED:
        return {}
    strings = all(isinstance(key, str) for key in value)
    numbers = sorted(value.values()) if strings else []
    # Options, such as {"rank": 1, "epochs": 10}, do not follow one another.
    first = numbers[0] if numbers and type(numbers[0]) is int else None
    in_order = first is not None and numbers == [*range(first, first + len(value))]
    # An Enum's members may be strings: their class cannot be read back elsewhere.
    return {str.__str__(k): v for k, v in value.items()} if in_order else {}


def note_numberings():
    """Note what numbers strings in the script's variables and their attributes."""
    left, seen = deque(), set()
    for frame in user_frames(sys._getframe(1)):
        name = frame.f_code.co_name
        left += [(f"{name}: {k}", v, 4) for k, v in [*variables_of(frame).items()]]
        left += [(k, v, 2) for k, v in [*frame.f_globals.items()]]
    while left and len(seen) < MAX_OBJECTS:
        name, value, depth = left.popleft()
        if id(value) in seen or isinstance(value, type | ModuleType | FunctionType):
            continue
        seen.add(id(value))
        with suppress(Exception):  # what has keys that cannot be compared
            if found := numbering(name, value):
                record.numberings.setdefault(name, found)
        attributes = getattr(value, "__dict__", {})
        if depth and isinstance(attributes, dict) and not isinstance(value, Module):
            left += [(f"{name}.{k}", v, depth - 1) for k, v in [*attributes.items()]]


def install():
    wrap(DataLoader, "__iter__", before=lambda *_: note_moment())
    wrap(dist, "destroy_process_group", before=lambda *_: note_moment())
