"""Numbers in the variables of the script after an evaluation, as rank 0 prints them.

A metric that each rank computes from its own part has another value on each rank,
whatever its formula is. All ranks note their variables when the next loop begins.
"""

import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from ddp_checkup.formulas import shows
from ddp_checkup.hooks.shared import wrap
from ddp_checkup.record import record, state, user_frames

MAX_NUMBERS = 500  # of one moment
MAX_MOMENTS = 50
# What is measured differs anyhow.
MEASURED = re.compile(
    r"time|sec|took|elapsed|duration|speed|thr?u|/s|/it|per_s|fps|eta|mem|[mg]i?b\b",
    re.IGNORECASE,
)


def reset():
    record.moments = {}  # by number of loops begun: {variable: number}
    record.shown = {}  # by the same: {variable: (line, text) that this rank printed}
    state.texts = []  # numbers that were printed since the last moment


def note_text(line, before, text):
    if len(state.texts) < MAX_NUMBERS and not MEASURED.search(before):
        state.texts.append((line, text))


def numbers_in(name, value, depth=2):
    """Yield (name, number) of a number, and of those that a container holds."""
    if MEASURED.search(name):
        return
    if isinstance(value, float):
        yield name, value
    elif depth and isinstance(value, Mapping):
        for key, each in [*value.items()][:50]:
            yield from numbers_in(f"{name}[{key!r}]", each, depth - 1)
    elif (
        depth and isinstance(value, Sequence) and not isinstance(value, str | bytes)
    ):
        for i, each in enumerate(value[-50:]):  # a history grows at its end
            yield from numbers_in(
                f"{name}[{i - min(50, len(value))}]", each, depth - 1
            )
    elif (
        depth
        and hasattr(value, "__dict__")
        and not isinstance(value, torch.nn.Module)
    ):
        for key, each in [*vars(value).items()][:50]:
            yield from numbers_in(f"{name}.{key}", each, depth - 1)


def note_moment():
    """Note the variables after an evaluation that this rank has read to its end."""
    loop = record.epochs[-1] if record.epochs else None
    if loop and loop.exhausted and not loop.steps and loop.first == loop.last:
        number = state.begun.total()
        if number not in record.moments and len(record.moments) < MAX_MOMENTS:
            found = {}
            for frame in user_frames(sys._getframe(1)):
                place = frame.f_code.co_name
                for name, value in [*frame.f_locals.items()]:
                    with suppress(Exception):  # of a container of the script's own
                        for key, number_ in numbers_in(name, value):
                            if len(found) < MAX_NUMBERS:
                                found[f"{place}: {key}"] = number_
            record.moments[number] = found
            record.shown[number] = {
                key: (line, text)
                for key, value in found.items()
                for line, text in state.texts
                if shows(text, value) or shows(text, 100 * value)
            }
    state.texts.clear()


def install():
    wrap(DataLoader, "__iter__", before=lambda *_: note_moment())
    wrap(dist, "destroy_process_group", before=lambda *_: note_moment())
