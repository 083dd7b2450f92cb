"""The trace of one rank: a list of events, in the order in which they happened.

Hooks append events. When the script has ended, rank 0 gathers all ranks' traces, and
the checks compare them.
"""

import functools
import os
import sys
import sysconfig
from collections import namedtuple
from types import SimpleNamespace

import torch

HERE = os.path.dirname(__file__)  # may contain "..", as the frames of this code do
# Code that is not the user's: "<frozen ...>", Python, packages, and this package.
FOLDERS = [sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")]
FOLDERS += [HERE, os.path.dirname(os.path.dirname(torch.__file__))]
MAIN = f"{os.path.dirname(HERE)}/__main__.py"
LIBRARIES = ("<", MAIN, *(f"{folder}/" for folder in FOLDERS))
INSTALLED = "/site-packages/", "/dist-packages/"  # these are packages in any folder


class Line(namedtuple("Line", "file number caller")):
    """A line of the user's code; caller: the script's line that led there."""

    def __str__(self):
        place = f"{os.path.basename(self.file)}:{self.number}"
        return f"{place} (from {self.caller})" if self.caller else place


class Event(SimpleNamespace):
    """An event: `kind`, `line`, `step` (optimizer steps before it), and more.

    Each hook's module says which fields its events have.
    """


class Trace:
    """The events of one rank, and where the script is at the moment."""

    def __init__(self):
        self.reset()

    def reset(self):
        """Forget everything, in a new process and in a forked one."""
        self.rank = self.world_size = None  # unknown before the process group
        self.script, self.package = "", ()  # its path; the folders of its package
        self.max_steps = 0  # optimizer steps after which the script ends; 0: never
        self.events, self.by_kind = [], {}
        self.step = 0  # optimizer steps so far
        self.loop = None  # the event of the loop over a DataLoader that runs
        self.batches = 0  # batches so far; without a DataLoader, steps so far
        # Since the last step: contents of the models' inputs, losses, the weight
        # of a target in them, and the number of backward passes
        self.inputs, self.losses, self.loss_weight, self.passes = [], [], None, 0
        self.activity = 0  # changes whenever this rank does something
        self.waiting = ""  # the collective that runs, which waits for other ranks
        self.calling = ""  # DDP's forward or backward(), which may wait for ranks
        self.switching = ""  # a method that a module calls for its parts, too
        self.finished = False  # whether the script came to its end

    def add(self, kind, **fields):
        """Append an event, and return it."""
        event = Event(kind=kind, step=self.step, time=len(self.events), **fields)
        self.events.append(event)
        self.by_kind.setdefault(kind, []).append(event)
        return event

    def of(self, kind):
        """Return the list of the events of this kind."""
        return self.by_kind.get(kind, [])

    def first(self, kind):
        """Return the first event of this kind, or None."""
        return next(iter(self.of(kind)), None)


trace = Trace()


@functools.cache
def is_installed(file):
    return file.startswith(LIBRARIES) or any(part in file for part in INSTALLED)


def is_library(file):
    """Return whether this file is not the user's code."""
    return is_installed(file) and not file.startswith(trace.package or "\0")


def user_frames(frame=None):
    """Yield the frames of the user's code, the innermost first."""
    frame = frame or sys._getframe(1)
    while frame:
        file = frame.f_code.co_filename
        if file == trace.script or not is_library(file):
            yield frame
        frame = frame.f_back


def user_line(frame=None, skip=None):
    """Return the user's innermost Line, or None if no frame is the user's.

    skip: a pattern for names of functions whose callers are meant instead.
    """
    frames = [*user_frames(frame or sys._getframe(1))]
    while skip and len(frames) > 1 and skip.search(frames[0].f_code.co_name):
        frames.pop(0)
    if not frames:
        return None
    file, number = frames[0].f_code.co_filename, frames[0].f_lineno
    caller = None
    for each in frames:
        if each.f_code.co_filename == trace.script:
            caller = f"{os.path.basename(trace.script)}:{each.f_lineno}"
            break
    same = file == trace.script and caller == f"{os.path.basename(file)}:{number}"
    return Line(file, number, None if same else caller)


def user_stack():
    """Return the user's files and lines that led here, as a text."""
    frames = user_frames(sys._getframe(1))
    return " ".join(f"{f.f_code.co_filename}:{f.f_lineno}" for f in frames)
