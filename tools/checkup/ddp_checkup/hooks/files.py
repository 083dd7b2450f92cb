"""Files that are written: by Python, and by what writes in C++ or Rust."""

import os
import re
import sys

import torch
from torch.utils.data import DataLoader

from ddp_checkup.hooks.shared import wrap
from ddp_checkup.record import record, state, user_line

CACHES = "/__pycache__/", "/.cache/", "/.triton/", "/torchinductor", ".lock"
EVENTS = re.compile("events.out.tfevents")  # TensorBoard names them by process
DATABASE = re.compile("mode=ro|mode=memory|:memory:")


def reset():
    record.files = {}  # by path: (line, how: "new", "append" or "events")


def audit(event, arguments):
    if event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR):
        note_file(arguments[0], "append" if arguments[2] & os.O_APPEND else "new")
    elif event == "os.rename":
        note_file(arguments[1])
    elif event == "sqlite3.connect" and not DATABASE.search(str(arguments[0])):
        note_file(arguments[0], "append")


def before_save(name, values):
    note_file(*[v for v in values if isinstance(v, str | bytes | os.PathLike)][:1])


def note_file(path=None, how="new"):
    if not isinstance(path, str | bytes | os.PathLike):
        return
    path = os.path.abspath(os.fsdecode(path))
    if path.startswith(("/dev/", "/proc/")) or any(c in path for c in CACHES):
        return
    folder, name = os.path.split(path)
    if EVENTS.match(name):
        path, how = folder, "events"
    line, old = record.files.get(path, (None, how))
    record.files[path] = line or user_line(), how if how == old else "new"
    if state.rank and state.epoch:  # its results may be merged from files
        state.epoch.gathered = state.epoch.reduced = True


def wrap_writers(*_):
    """Wrap what a script may have imported since: safetensors writes in Rust."""
    module = sys.modules.get("safetensors.torch")
    for name in ("save_file", "save_model"):
        function = getattr(module, name, None)
        if function and not hasattr(function, "__wrapped__"):
            wrap(module, name, before=before_save)


def install():
    wrap(torch, "save", before=before_save)
    wrap(torch.jit, "save", before=before_save)
    wrap(torch.jit.ScriptModule, "save", before=before_save)
    wrap(torch.export, "save", before=before_save)
    wrap(torch.profiler.profile, "export_chrome_trace", before=before_save)
    wrap(torch.autograd.profiler.profile, "export_chrome_trace", before=before_save)
    wrap(DataLoader, "__iter__", before=wrap_writers)
    sys.addaudithook(audit)
