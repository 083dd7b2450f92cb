"""Loops over loaders: which indices, in which order, and the contents of batches."""

import functools
import json
import os
import weakref
from collections import Counter
from contextlib import suppress
from types import SimpleNamespace

import torch
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, IterableDataset, Subset, get_worker_info
from torch.utils.data._utils.fetch import _BaseDatasetFetcher as Fetcher
from torch.utils.data.dataloader import _BaseDataLoaderIter as Iterator

from ddp_checkup.hooks.shared import contents, random_states, samples, wrap
from ddp_checkup.record import record, state, user_line, user_stack

MAX_BATCHES = 50  # whose contents are compared
MAX_TENSORS = 8  # of a step, of those that go into models


def reset():
    record.epochs = []  # loops over loaders
    record.inputs, record.batches = {}, {}  # by label: checksums of tensors
    record.samples = {}  # by loop: its line, and checksums of samples by tensor
    state.epoch, state.loops = None, 0  # the present loop; those with steps
    state.begun = Counter()  # loops, by key
    state.batch, state.reduced = 0, False  # whether a number was reduced since it
    state.loading = False  # whether a loader makes a batch in this process
    state.worker_notes = None  # a pipe in which forked workers write


def loop_of(iterator):
    new = SimpleNamespace(
        dealt=[], sizes=[], batches=0, steps=0, length=float("inf"), last=0
    )
    new.exhausted = new.gathered = new.reduced = False
    new.label = new.latest = new.printed = None  # printed: the line that did
    return vars(iterator).setdefault("checkup", new)


def after_init(result, values):
    vars(values[0])["checkup_made"] = user_stack()


def after_next_index(batch, values):
    loop_of(values[0]).dealt.append(batch)


def before_iter(name, values):
    if state.worker_notes is None:
        state.worker_notes = os.pipe()
        for end in state.worker_notes:
            os.set_blocking(end, False)
    # Persistent workers reuse the iterator.
    vars(values[0]._iterator or state).pop("checkup", None)


def after_fetcher(result, values):
    """Tell, in a worker, which random numbers it begins with, after its init_fn."""
    worker = get_worker_info()
    if worker and state.worker_notes:
        note = len(record.epochs), worker.id, random_states()
        with suppress(BlockingIOError):  # the pipe is full
            os.write(state.worker_notes[1], f"{json.dumps(note)}\n".encode())


def read_worker_notes():
    """Return the states of the workers' generators, by (loop, worker)."""
    text = b""
    with suppress(BlockingIOError):
        while state.worker_notes:
            text += os.read(state.worker_notes[0], 1 << 16)
    notes = map(json.loads, text.splitlines())
    return {(loop, worker): states for loop, worker, states in notes}


def subset_of(data):
    """Return the Subset that a data set wraps item by item, or the data set."""
    values = getattr(data, "__dict__", {}).values()
    inner = [value for value in values if isinstance(value, Subset)]
    with suppress(TypeError):  # a stream has no length
        if len(inner) == 1 and len(inner[0]) == len(data):
            return inner[0]
    return data


def after_iter(iterator, values):
    loop, loader = loop_of(iterator), values[0]
    data, subsets = subset_of(loader.dataset), []
    while hasattr(data, "indices") and hasattr(data, "dataset"):  # Subsets
        subsets, data = [*subsets, data.indices], subset_of(data.dataset)
    stream = isinstance(data, IterableDataset) or not hasattr(data, "__len__")
    loop.base_length = 0 if stream else len(data)
    loop.loader, loop.subsets, loop.data = loader, subsets, data
    loop.iterator = weakref.ref(iterator)
    with suppress(TypeError):  # some have no length
        loop.length = len(loader)
    loop.line, made = user_line(), vars(loader).get("checkup_made", "")
    # Ranks may iterate in different lines, for example with a progress bar on one.
    functions = user_stack(lambda frame: frame.f_code.co_name)
    loop.key = f"{functions} {made} {loop.base_length} {len(subsets)}"
    loop.first = loop.last = state.steps
    loop.no_grad = not torch.is_grad_enabled()
    loop.losses = len(record.losses)
    state.random_loop = None  # it has drawn a seed
    record.epochs.append(loop)
    state.begun[loop.key] += 1
    loop.number = state.begun[loop.key]


def wrap_next():
    original = Iterator.__next__

    @functools.wraps(original)
    def wrapper(self):
        state.events += 1
        loop, state.loading = loop_of(self), True
        try:
            batch = original(self)
        except StopIteration:
            loop.exhausted = True
            raise
        finally:
            state.loading = False
        state.epoch, loop.batches, loop.last = loop, loop.batches + 1, state.steps
        loop.sizes.append(batch_size(batch))
        state.batch, state.reduced = state.batch + 1, False
        if state.steps < MAX_BATCHES:
            loop.latest = contents(batch)
            note_samples(loop, batch)
        return batch

    Iterator.__next__ = wrapper


def batch_size(batch):
    """Return the first dimension of its first tensor that has one, or 0."""
    sizes = (t.shape[0] for t in tree_leaves(batch) if getattr(t, "shape", ()))
    return next(sizes, 0)


def note_samples(loop, batch):
    _, found = record.samples.setdefault((loop.key, loop.number), (loop.line, {}))
    for number, checksums in samples(batch).items():
        found.setdefault(number, []).append(checksums)


def leave_evaluation():
    """Forget an evaluation that has ended: the training may have no DataLoader."""
    if state.epoch and state.epoch.exhausted and state.epoch.no_grad:
        state.epoch = None


def next_label(loop):
    """Return (loop, step in it): steps of ranks are compared if these are equal."""
    if loop is None:
        return 0, state.steps
    if loop.label is None:
        state.loops += 1
        loop.label = state.loops
    return loop.label, loop.steps


def note_inputs(values):
    """Record checksums of what goes into models in this step."""
    label = next_label(state.epoch)
    known = record.inputs.get(label, [])  # of earlier forwards in this step
    if state.steps < MAX_BATCHES and len(known) < MAX_TENSORS:
        tensors = known + contents(values)
        if tensors:
            record.inputs[label] = tensors


def install():
    wrap(DataLoader, "__init__", after=after_init)
    wrap(DataLoader, "__iter__", before=before_iter, after=after_iter)
    wrap(Fetcher, "__init__", after=after_fetcher)
    wrap(Iterator, "_next_index", after=after_next_index)
    wrap_next()
