"""The hooks' notes: `record` is sent to rank 0, `state` stays in its process."""

import os
import sys
import sysconfig
from collections import Counter, defaultdict
from types import SimpleNamespace

import torch

HERE = os.path.dirname(os.path.abspath(__file__))
# Code that is not the user's: "<frozen ...>", Python, packages, and this one.
LIBRARIES = ["<", f"{HERE}/", f"{os.path.dirname(HERE)}/__main__.py"]
LIBRARIES += [f"{sysconfig.get_path(p)}/" for p in ("stdlib", "purelib", "platlib")]
LIBRARIES += [f"{os.path.dirname(os.path.dirname(torch.__file__))}/"]
LIBRARIES = tuple(LIBRARIES)

record = SimpleNamespace()
state = SimpleNamespace()


def reset():
    """Start with empty records: in a new process, and when it is forked."""
    vars(record).clear()
    vars(state).clear()
    record.device = None  # of the parameters; None before the first step
    record.names, record.models = {}, []  # by id(parameter); per step (line, names)
    record.start, record.gradients, record.weights = [], [], []  # checksums per step
    record.shards = {}  # by parameter: (coordinates of the shard, shape, checksum)
    record.clips = {}  # by label: (line, norm) of clipped gradients
    record.labels = []  # per step: (number of its loop over a loader, step in it)
    record.inputs, record.batches = {}, {}  # by label: checksums of tensors
    record.random = []  # states of the random number generators: first, later
    record.read = defaultdict(list)  # by line: numbers of tensors
    record.drawn_alike = False  # DTensors on CPUs, where all ranks draw the same
    record.epochs = []  # loops over loaders
    record.sharded = record.parallel = record.join = False
    record.counts, record.last = Counter(), {}  # collectives, by group
    record.files, record.syncs = {}, defaultdict(set)
    record.prints, record.reduced = {}, False  # rank 0's own numbers in its output
    record.unused = (
        None  # where DDP found parameters without a gradient; None: no DDP
    )
    record.closed = None  # None: no process group was made
    state.rank = state.world = None  # unknown before the process group
    state.store, state.script, state.max_steps = None, "", 0
    state.main_prefix = ()
    state.events = state.steps = state.batch = state.depth = 0
    state.epoch, state.loops, state.forward_batch = None, 0, -1
    state.trained, state.values = set(), defaultdict(list)
    state.summed, state.totals, state.reduced = [], defaultdict(list), False
    state.shared, state.loss = defaultdict(list), None
    state.joins, state.join_step, state.shadowing = 0, 0, ""  # with join()
    state.random_loop = state.fsdp_root = None
    state.waiting, state.busy = "", 0
    state.ddp, state.forward_line = None, ""  # the last forward with gradients
    state.lines, state.partial = [], ""  # what this rank has printed
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
    if frames[0].f_code.co_filename == state.script:
        return line
    from_script = [f for f in frames if f.f_code.co_filename == state.script]
    return f"{line} (from {line_of(from_script[0])})" if from_script else line


def user_stack():
    """Return all user lines that led here; it tells loaders of one helper apart."""
    return " ".join(map(line_of, user_frames(sys._getframe(1))))
