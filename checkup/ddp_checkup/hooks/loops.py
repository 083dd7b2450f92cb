"""Loops over DataLoaders: one `loop` event per loop.

    key, number    which loop over which data this is, alike on all ranks; number:
                   its place among the loops with this key
    place, turn    the same, for data of any length
    loader         number of the sampler with a set_epoch(), else of the loader
    first, last    optimizer steps before the loop, and before its last batch
    steps          optimizer steps within it
    batches        batches so far; sizes: their sizes; length: the loader's length
    exhausted      whether it came to its end
    no_grad        whether gradients were switched off
    base_length    length of the data set below all Subsets; 0: a stream
    samples        checksums of the samples, by number of the tensor
    reduced        whether anything was reduced since it began; gathered: whether
                   anything was gathered
    printed        line that printed something after it

items.py adds what the indices mean.
"""

import functools
import json
import os
import weakref
from collections import Counter
from contextlib import suppress

import torch
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, IterableDataset, Subset, get_worker_info
from torch.utils.data._utils.fetch import _BaseDatasetFetcher as Fetcher
from torch.utils.data.dataloader import _BaseDataLoaderIter as Iterator

from ddp_checkup.hooks.checksums import contents, random_states, sample_checksums
from ddp_checkup.hooks.wrapping import number_in, wrap
from ddp_checkup.trace import trace, user_frames, user_line, user_stack

MAX_STEPS = 50  # steps in which the contents of batches are compared
MAX_INPUTS = 8  # tensors of a step that are compared


def reset():
    global worker_notes, seen, turns, steps_by_line, loading
    worker_notes = None  # a pipe into which forked workers write
    seen = []  # samplers and loaders, which are kept so that no other gets their id
    turns = Counter()  # loops, by place and by key
    steps_by_line = Counter()  # steps outside of loops
    loading = False  # whether a loader makes a batch in this process


def after_init(result, values):
    vars(values[0])["checkup_made"] = user_stack()


def pending_of(iterator):
    """Return the list of indices by batch, which the loop event will share."""
    return vars(iterator).setdefault("checkup", [])


def after_next_index(batch, values):
    pending_of(values[0]).append(batch)


def before_iter(name, values):
    global worker_notes
    if worker_notes is None:
        worker_notes = os.pipe()
        for end in worker_notes:
            os.set_blocking(end, False)
    # Persistent workers reuse the iterator.
    iterator = getattr(values[0], "_iterator", None)
    if iterator is not None:
        vars(iterator).pop("checkup", None)
        vars(iterator).pop("checkup_loop", None)


def after_fetcher(result, values):
    """Send a worker's random states, as they are after its worker_init_fn."""
    worker = get_worker_info()
    if worker and worker_notes:
        note = len(trace.of("loop")), worker.id, random_states()
        with suppress(BlockingIOError):  # the pipe is full
            os.write(worker_notes[1], f"{json.dumps(note)}\n".encode())


def read_worker_notes():
    """Return {number of a loop: {worker: states of its generators}}."""
    text, found = b"", {}
    with suppress(BlockingIOError):
        while worker_notes:
            text += os.read(worker_notes[0], 1 << 16)
    for loop, worker, states in map(json.loads, text.splitlines()):
        found.setdefault(loop, {})[worker] = states
    return found


def subset_of(data):
    """Return the Subset that a data set wraps item by item, or the data set."""
    values = getattr(data, "__dict__", {}).values()
    inner = [value for value in values if isinstance(value, Subset)]
    with suppress(TypeError):  # a stream has no length
        if len(inner) == 1 and len(inner[0]) == len(data):
            return inner[0]
    return data


def has_length(data):
    with suppress(TypeError, NotImplementedError):
        return len(data) >= 0
    return False


def after_iter(iterator, values):
    loader = values[0]
    data, subsets = subset_of(loader.dataset), []
    while hasattr(data, "indices") and hasattr(data, "dataset"):  # Subsets
        subsets, data = [*subsets, data.indices], subset_of(data.dataset)
    stream = isinstance(data, IterableDataset) or not has_length(data)
    base_length = 0 if stream else len(data)
    # Ranks may iterate in different lines, for example with a progress bar on one.
    functions = " ".join(frame.f_code.co_name for frame in user_frames())
    made = vars(loader).get("checkup_made", "")
    place = f"{functions} {made}"
    key = f"{place} {base_length} {len(subsets)}"
    turns.update([place, key])
    sampler = getattr(loader.batch_sampler, "sampler", loader.sampler)
    loop = trace.add(
        "loop",
        line=user_line(),
        key=key,
        number=turns[key],
        place=place,
        turn=turns[place],
        loader=number_in(seen, sampler if hasattr(sampler, "set_epoch") else loader),
        dealt=pending_of(iterator),
        sizes=[],
        batches=0,
        length=len(loader) if has_length(loader) else float("inf"),
        steps=0,
        first=trace.step,
        last=trace.step,
        exhausted=False,
        no_grad=not torch.is_grad_enabled(),
        base_length=base_length,
        samples={},
        reduced=False,
        gathered=False,
        printed=None,
    )
    # The fields below do not leave this process.
    loop.source = loader, sampler, subsets, data
    loop.iterator, loop.latest = weakref.ref(iterator), None
    vars(iterator)["checkup_loop"] = loop


def wrap_next():
    original = Iterator.__next__

    @functools.wraps(original)
    def wrapper(self):
        global loading
        trace.activity += 1
        loop, loading = vars(self).get("checkup_loop"), True
        try:
            batch = original(self)
        except StopIteration:
            if loop:
                loop.exhausted = True
            raise
        finally:
            loading = False
        trace.batches += 1
        if loop:
            note_batch(loop, batch)
        return batch

    Iterator.__next__ = wrapper


def note_batch(loop, batch):
    trace.loop, loop.batches, loop.last = loop, loop.batches + 1, trace.step
    shapes = (getattr(t, "shape", ()) for t in tree_leaves(batch))
    loop.sizes.append(next((shape[0] for shape in shapes if shape), 0))
    if trace.step < MAX_STEPS:
        loop.latest = contents(batch)
        for number, found in sample_checksums(batch).items():
            loop.samples.setdefault(number, []).append(found)


def note_inputs(values):
    """Note the contents of the models' inputs before this step."""
    if trace.step < MAX_STEPS and len(trace.inputs) < MAX_INPUTS:
        trace.inputs += contents(values)


def is_running(loop):
    """Return whether the script is in the middle of this loop."""
    return not loop.exhausted and loop.iterator() is not None


def leave_evaluation():
    """Forget an evaluation that has ended: the training may have no DataLoader."""
    if trace.loop and trace.loop.exhausted and trace.loop.no_grad:
        trace.loop = None


def next_label(line):
    """Return the label of the next step; ranks' steps with one label are compared.

    The label is (place of the loop, its turn, steps in it), or (line, 0, steps at
    the line) outside of loops.
    """
    loop = trace.loop
    if loop:
        return loop.place, loop.turn, loop.steps
    steps_by_line[str(line)] += 1
    return str(line), 0, steps_by_line[str(line)]


def install():
    wrap(DataLoader, "__init__", after=after_init)
    wrap(DataLoader, "__iter__", before=before_iter, after=after_iter)
    wrap(Fetcher, "__init__", after=after_fetcher)
    wrap(Iterator, "_next_index", after=after_next_index)
    wrap_next()
