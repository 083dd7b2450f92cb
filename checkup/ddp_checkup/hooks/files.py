"""Files and folders: `file` events.

    path         absolute path
    action       "write", "append", "rename" (to this path), "read", "remove",
                 "remove tree", "make" (a folder) or "events" (TensorBoard writes
                 them into the folder)
    collectives  collectives of all ranks before it
    file, empty  added at the end: the number of the file on the disk (None: it is
                 gone), and whether it is empty

Reads count only if the file is newer than the start of this rank.
"""

import os
import re
import sys
import time
from contextlib import suppress

import torch

from ddp_checkup.hooks import collectives, late
from ddp_checkup.hooks.wrapping import wrap
from ddp_checkup.trace import trace, user_line

CACHES = ["/__pycache__/", "/.cache/", "/.triton/", "/torchinductor", ".lock"]
# Variables that name another folder for a compiler's or a library's cache
MOVED = "TORCHINDUCTOR_CACHE_DIR TRITON_CACHE_DIR TORCH_EXTENSIONS_DIR HF_HOME"
CACHES += [os.environ[name] for name in MOVED.split() if os.environ.get(name)]
EVENTS = re.compile("events.out.tfevents")  # TensorBoard names them by process
DATABASE = re.compile("mode=ro|mode=memory|:memory:")
MAX_FILES = 3000
# Functions that write in C++ or Rust; their first path is the file.
WRITERS = (
    ("safetensors.torch", "save_file"),
    ("safetensors.torch", "save_model"),
    ("torchvision.io.image", "write_file"),  # write_png() calls it
    ("cv2", "imwrite"),
)


def reset():
    global started, noted
    started = time.time()
    noted = set()  # (path, action, collectives) of events


def audit(event, arguments):
    if event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR):
        appends = arguments[2] & os.O_APPEND
        note(arguments[0], "append" if appends else "write")
    elif event == "open" and trace.of("group") and is_new(arguments[0]):
        note(arguments[0], "read")
    elif event == "os.mkdir":
        note(arguments[0], "make")
    elif event == "os.remove":
        note(arguments[0], "remove")
    elif event == "shutil.rmtree":
        note(arguments[0], "remove tree")
    elif event == "os.rename":  # the file appears whole, so nobody reads half of it
        note(arguments[1], "rename")
    elif event == "sqlite3.connect" and not DATABASE.search(str(arguments[0])):
        note(arguments[0], "append")


def is_new(path):
    """Return whether a file was made since this rank began, or is not there yet."""
    with suppress(OSError, TypeError):
        return os.stat(path).st_mtime > started
    return isinstance(path, str | bytes | os.PathLike)


def note(path, action):
    if not isinstance(path, str | bytes | os.PathLike) or len(noted) >= MAX_FILES:
        return
    path = os.path.abspath(os.fsdecode(path))
    if path.startswith(("/dev/", "/proc/")) or any(part in path for part in CACHES):
        return
    if action == "write" and EVENTS.match(os.path.basename(path)):
        path, action = os.path.dirname(path), "events"
    count = collectives.counts[None]
    if (path, action, count) in noted:
        return
    noted.add((path, action, count))
    line = user_line()
    if line or action == "events":  # TensorBoard writes in a thread
        trace.add("file", line=line, path=path, action=action, collectives=count)
    if trace.rank != 0 and trace.loop and action in ("write", "append"):
        # Rank 0 may merge the others' results from their files.
        trace.loop.gathered = trace.loop.reduced = True


def before_save(name, values):
    for path in [v for v in values if isinstance(v, str | bytes | os.PathLike)][:1]:
        note(path, "write")


def finish():
    """Note which files are gone or empty, as those are no results."""
    for event in trace.of("file"):
        is_file = os.path.isfile(event.path)
        # A folder is opened for a file without a name.
        exists = is_file or (event.action == "events" and os.path.isdir(event.path))
        event.file = os.stat(event.path).st_ino if exists else None
        event.empty = is_file and not os.path.getsize(event.path)


def install():
    wrap(torch, "save", before=before_save)
    wrap(torch.jit, "save", before=before_save)
    wrap(torch.jit.ScriptModule, "save", before=before_save)
    wrap(torch.profiler.profile, "export_chrome_trace", before=before_save)
    wrap(torch.autograd.profiler.profile, "export_chrome_trace", before=before_save)
    for module, name in WRITERS:
        late.wrap_when_imported(module, name, before=before_save)
    late.wrap_when_imported("torch.export", "save", before=before_save)
    sys.addaudithook(audit)
