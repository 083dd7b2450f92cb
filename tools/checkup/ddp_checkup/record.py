"""The hooks' notes: `record` is sent to rank 0, `state` stays in its process."""

import inspect
import os
import sys
import sysconfig
import traceback
from types import SimpleNamespace

import torch

EXIT = os._exit  # the script's is wrapped
INTERRUPTED = 130  # the exit status after Ctrl-C, as a shell says it
HERE = os.path.dirname(__file__)  # with ".." in it, as in the frames of this code
# Code that is not the user's: "<frozen ...>", Python, packages, and this one.
FOLDERS = [sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")]
FOLDERS += [HERE, os.path.dirname(os.path.dirname(torch.__file__))]
MAIN = f"{os.path.dirname(HERE)}/__main__.py"
LIBRARIES = ("<", MAIN, *(f"{folder}/" for folder in FOLDERS))
INSTALLED = "/site-packages/", "/dist-packages/"  # of a user, or of another folder

record = SimpleNamespace()
state = SimpleNamespace()


def reset():
    """Empty both, and set what no hook sets; hooks.reset() adds the rest."""
    vars(record).clear()
    vars(state).clear()
    state.rank = state.world = None  # unknown before the process group
    state.store, state.owns_store = None, False
    state.script, state.max_steps = "", 0
    state.address, state.main_prefix = None, ()  # of a spawned rank's store; -m's
    record.paths = {}  # of files, by the lines that were noted
    state.noticed = False  # whether a long wait was told
    state.grouped = False  # whether the script has made a process group
    state.events = 0  # whatever shows that this rank does something
    state.fails = False  # whether the script has ended with an error
    state.end = ""  # "done", "stopped" (--steps), "failed" or "unseen"


def is_library(file):
    if file.startswith(state.main_prefix):
        return False
    return file.startswith(LIBRARIES) or any(part in file for part in INSTALLED)


def user_frames(frame):
    """Yield the frames of the user's code, the innermost first."""
    for each, _ in traceback.walk_stack(frame):
        file = each.f_code.co_filename
        if file == state.script or not is_library(file):
            yield each


def variables_of(frame):
    """Return a frame's variables; none where to read them would change the script's.

    Before Python 3.13 f_locals is the dict that locals() has returned to the script.
    """
    code = frame.f_code
    of_function = code.co_flags & inspect.CO_NEWLOCALS
    if sys.version_info < (3, 13) and of_function and "locals" in code.co_names:
        return {}
    return frame.f_locals


def line_of(frame):
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"


def user_line(frame=None, skip=None):
    """Return the user's innermost line, and the script's line that led there.

    skip: a pattern for names of functions that call for others.
    """
    frames = [*user_frames(frame or sys._getframe(1))]
    while skip and len(frames) > 1 and skip.search(frames[0].f_code.co_name):
        frames.pop(0)
    if not frames:
        return ""
    line = line_of(frames[0])
    record.paths[line] = frames[0].f_code.co_filename
    script = [line_of(f) for f in frames if f.f_code.co_filename == state.script]
    return f"{line} (from {script[0]})" if {*script[:1]} - {line} else line


def user_stack(part=line_of):
    """Return all user lines that led here; it tells loaders of one helper apart."""
    return " ".join(map(part, user_frames(sys._getframe(1))))
