"""Files that are written: by Python, and by what writes in C++ or Rust.

Of what is read, only files that are newer than the start of this rank are noted.
"""

import os
import re
import sys
import time
from contextlib import suppress

import torch
from torch.utils.data import DataLoader

from ddp_checkup.hooks.shared import wrap
from ddp_checkup.record import record, state, user_line

CACHES = ["/__pycache__/", "/.cache/", "/.triton/", "/torchinductor", ".lock"]
# Variables that name another folder for a compiler's or a library's cache
MOVED = "TORCHINDUCTOR_CACHE_DIR TRITON_CACHE_DIR TORCH_EXTENSIONS_DIR HF_HOME"
CACHES += [os.environ[name] for name in MOVED.split() if os.environ.get(name)]
EVENTS = re.compile("events.out.tfevents")  # TensorBoard names them by process
DATABASE = re.compile("mode=ro|mode=memory|:memory:")
MAX_FILES = 1000
# Functions in C++ or Rust that write: their first path is the file.
WRITERS = {
    "safetensors.torch": ("save_file", "save_model"),
    "torchvision.io.image": ("write_file",),  # write_png() calls it
    "cv2": ("imwrite",),
}


def reset():
    record.files = {}  # by path: (line, how: "new", "append" or "events")
    # By path: {how many collectives there were before it: line}
    record.writes, record.reads = {}, {}
    record.folders = {}  # by path: the line that has made it, or found it there
    record.removed = set()  # files that it has removed, or wanted to
    record.failed_at = None  # (line, path) of the file or folder by which it failed
    state.started = time.time()


def audit(event, arguments):
    if event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR):
        how = "append" if arguments[2] & os.O_APPEND else "new"
        note_time(note_file(arguments[0], how), record.writes)
    elif event == "open" and state.grouped:
        path = path_of(arguments[0])
        # One that is not there yet may be too early as well.
        if path and not is_older(path):
            note_time(path, record.reads)
    elif event == "os.mkdir" and len(record.folders) < MAX_FILES:
        path = os.path.abspath(os.fsdecode(arguments[0]))
        record.folders.setdefault(path, user_line())
    elif event == "os.remove" and len(record.removed) < MAX_FILES:
        record.removed.add(os.path.abspath(os.fsdecode(arguments[0])))
    elif event == "os.rename":  # whole at once, and so no one reads a half
        note_file(arguments[1])
    elif event == "sqlite3.connect" and not DATABASE.search(str(arguments[0])):
        note_file(arguments[0], "append")


def is_older(path):
    """Return whether a file was there before this rank began."""
    with suppress(OSError):
        return os.stat(path).st_mtime <= state.started
    return False


def before_save(name, values):
    for path in [v for v in values if isinstance(v, str | bytes | os.PathLike)][:1]:
        note_time(note_file(path), record.writes)


def path_of(path):
    """Return the whole path of a file, or None if it is no file of the script's."""
    if not isinstance(path, str | bytes | os.PathLike):
        return None
    path = os.path.abspath(os.fsdecode(path))
    other = path.startswith(("/dev/", "/proc/")) or any(c in path for c in CACHES)
    return None if other else path


def note_time(path, times):
    if path and len(times) < MAX_FILES:
        times.setdefault(path, {})[record.counts[None]] = user_line()


def note_file(path, how="new"):
    """Note who writes a file; return its whole path."""
    path = key = path_of(path)
    if path is None:
        return None
    folder, name = os.path.split(path)
    if EVENTS.match(name):
        key, how = folder, "events"
    line, old = record.files.get(key, (None, how))
    record.files[key] = line or user_line(), how if how == old else "new"
    if state.rank and state.epoch:  # its results may be merged from files
        state.epoch.gathered = state.epoch.reduced = True
    return path


def wrap_writers(*_):
    """Wrap what a script may have imported since, and what does not call open()."""
    for name, functions in WRITERS.items():
        module = sys.modules.get(name)
        for function in functions:
            value = getattr(module, function, None)
            if value and not hasattr(value, "__wrapped__"):
                wrap(module, function, before=before_save)


def install():
    wrap(torch, "save", before=before_save)
    wrap(torch.jit, "save", before=before_save)
    wrap(torch.jit.ScriptModule, "save", before=before_save)
    wrap(torch.export, "save", before=before_save)
    wrap(torch.profiler.profile, "export_chrome_trace", before=before_save)
    wrap(torch.autograd.profiler.profile, "export_chrome_trace", before=before_save)
    wrap(DataLoader, "__iter__", before=wrap_writers)
    wrap(torch.optim.Optimizer, "__init__", before=wrap_writers)
    sys.addaudithook(audit)
