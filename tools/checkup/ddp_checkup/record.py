"""The hooks' notes: `record` is sent to rank 0, `state` stays in its process."""

import ast
import linecache
import os
import sys
import sysconfig
from contextlib import suppress
from types import SimpleNamespace

import torch

HERE = os.path.dirname(__file__)  # with ".." in it, as in the frames of this code
# Code that is not the user's: "<frozen ...>", Python, packages, and this one.
FOLDERS = [sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")]
FOLDERS += [HERE, os.path.dirname(os.path.dirname(torch.__file__))]
MAIN = f"{os.path.dirname(HERE)}/__main__.py"
LIBRARIES = ("<", MAIN, *(f"{folder}/" for folder in FOLDERS))

record = SimpleNamespace()
state = SimpleNamespace()


def reset():
    """Empty both, and set what no hook sets; hooks.reset() adds the rest."""
    vars(record).clear()
    vars(state).clear()
    state.rank = state.world = None  # unknown before the process group
    state.store, state.script, state.max_steps = None, "", 0
    state.address, state.main_prefix = None, ()  # of a spawned rank's store; -m's
    state.events = 0  # whatever shows that this rank does something
    state.end = ""  # "done", "stopped" (--steps), "failed" or "killed"


def is_library(file):
    return file.startswith(LIBRARIES) and not file.startswith(state.main_prefix)


def user_frames(frame):
    """Yield the frames of the user's code, the innermost first."""
    while frame:
        file = frame.f_code.co_filename
        if file == state.script or not is_library(file):
            yield frame
        frame = frame.f_back


def line_of(frame):
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"


def user_line(frame=None):
    """Return the user's innermost line, and the script's line that led there."""
    frames = [*user_frames(frame or sys._getframe(1))]
    if not frames:
        return ""
    line = line_of(frames[0])
    script = [line_of(f) for f in frames if f.f_code.co_filename == state.script]
    return f"{line} (from {script[0]})" if {*script[:1]} - {line} else line


def user_loops(frame):
    """Return the lines of the loops that the user's code is in, outermost first."""
    loops = []
    for f in user_frames(frame):
        file, line, tree = f.f_code.co_filename, f.f_lineno, ast.Module([], [])
        with suppress(SyntaxError):  # it may have been edited
            tree = ast.parse("".join(linecache.getlines(file)))
        nodes = [n for n in ast.walk(tree) if isinstance(n, ast.For | ast.While)]
        nodes = [n for n in nodes if n.lineno <= line <= n.body[-1].end_lineno]
        loops[:0] = [f"{os.path.basename(file)}:{n.lineno}" for n in nodes]
    return loops


def user_stack():
    """Return all user lines that led here; it tells loaders of one helper apart."""
    return " ".join(map(line_of, user_frames(sys._getframe(1))))
