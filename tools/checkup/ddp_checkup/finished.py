"""What a rank sends to rank 0 at its end, with what its loaders have dealt out."""

import os
import random
import sys
import zlib
from collections import Counter, defaultdict
from contextlib import suppress
from types import SimpleNamespace

import torch
from torch.utils._pytree import tree_flatten, tree_map_only
from torch.utils.data import DistributedSampler, SubsetRandomSampler

from ddp_checkup.hooks.loaders import read_worker_notes
from ddp_checkup.hooks.modules import STATISTICS, note_tensors
from ddp_checkup.hooks.shared import checksums
from ddp_checkup.hooks.steps import schedules
from ddp_checkup.record import is_library, record, state

FRAMEWORKS = "lightning", "pytorch_lightning", "transformers.trainer", "accelerate"
ON_DEVICE = "start", "gradients", "weights", "inputs", "batches", "clips", "shards"
ON_DEVICE += "tensors", "first", "scales", "losses", "sums", "samples", "overwritten"
ON_DEVICE += "class_weights", "given", "contrasts", "undivided", "divisors"
MAX_EPOCHS = 3  # of each loop
MAX_ITEMS = 200_000  # of a data set whose lists are compared
KEPT = "key", "line", "first", "gathered", "reduced", "printed"
PLAIN = str, bytes, int, float, complex, os.PathLike, torch.dtype


def fingerprint(loop, changed=(), collated=False):
    """Return checksums of some items; None if they vary.

    changed: the generators that get another seed than 0; collated: make a batch of
    each item.
    """
    data, found = loop.data, []
    try:
        for i in [*range(0, loop.base_length, loop.base_length // 8 + 1)] * 2:
            torch.manual_seed(int("PyTorch's generator" in changed))
            random.seed(int("Python's random" in changed))
            if "numpy" in sys.modules:
                sys.modules["numpy"].random.seed(int("NumPy's generator" in changed))
            item = collate(loop.loader, data[i]) if collated else data[i]
            found.append(digest(item))
    except Exception:  # it may be closed, or hold what has no contents
        return None
    half = len(found) // 2
    return found[:half] if found[:half] == found[half:] else None


def collate(loader, item):
    return loader.collate_fn([item] if loader.batch_sampler is not None else item)


def digest(item):
    """Return the contents of an item: equal items may have different pickles."""
    if isinstance(item, torch.Tensor):
        return item.shape, checksums([item]).tolist()
    if item is None or isinstance(item, PLAIN):
        return item
    if hasattr(item, "tobytes"):  # an array or an image
        return zlib.crc32(item.tobytes())
    if hasattr(item, "to_dict"):  # a graph
        item = item.to_dict()
    leaves, structure = tree_flatten(item)
    if leaves and leaves[0] is item:  # an object
        leaves = sorted(vars(item).items())
    return str(structure), [digest(leaf) for leaf in leaves]


def finished_record(done):
    """Return the record, ready to be sent; done: the script came to its end."""
    trained = {id(loop.loader) for loop in record.epochs if trains(loop)}
    sent, seen = SimpleNamespace(**vars(record)), Counter()
    sent.rank, sent.steps, sent.done = state.rank, state.steps, done
    sent.epochs, sent.loaders = [], len(record.epochs)
    sent.backwards, sent.grouped = state.passes, state.grouped
    training = {(loop.key, loop.number) for loop in record.epochs if trains(loop)}
    sent.samples = {key: record.samples[key] for key in training & {*record.samples}}
    notes = read_worker_notes()
    for number, loop in enumerate(record.epochs):
        seen[loop.key, trains(loop)] += 1
        if loop.base_length and seen[loop.key, trains(loop)] <= MAX_EPOCHS:
            workers = {w: states for (n, w), states in notes.items() if n == number}
            sent.epochs += finished_loop(loop, done, trained, workers)
    sent.syncs = {line: len(b & state.trained) for line, b in record.syncs.items()}
    sent.trained = len(state.trained)
    sent.framework = any(name in sys.modules for name in FRAMEWORKS)
    stopped = state.end in ("", "failed")
    waits = stopped and record.device not in (None, "cpu")  # a GPU may, for ever
    if not waits:
        sent.weights = [*record.weights, checksums(state.last_parameters)]
        sent.labels = [*record.labels, "end"]
        for entry in state.modules.values() if done else ():
            note_tensors(entry, "at the end")
    for name in ON_DEVICE:
        values = {} if waits else getattr(sent, name)
        setattr(sent, name, tree_map_only(torch.Tensor, torch.Tensor.tolist, values))
    sent.statistics = statistics() if done else {}
    sent.schedules = schedules() if done else []
    sent.unwaited = [(line, what) for line, what, _ in state.unwaited.values()]
    sent.files = {}
    for path, (line, kind) in record.files.items():
        # A folder is opened for a file without a name.
        if os.path.isfile(path) or (kind == "events" and os.path.isdir(path)):
            sent.files[path, os.stat(path).st_ino] = line, kind
    return sent


def statistics():
    """Return {name of a class: checksums of its objects' mean, var and std}."""
    found = defaultdict(list)
    for each in state.normalisers:
        arrays = [vars(each)[name] for name in STATISTICS if name in vars(each)]
        with suppress(Exception):  # what has no contents
            checksum = zlib.crc32(repr(digest(arrays)).encode())
            found[type(each).__name__].append(checksum)
    return found


def list_checksums(data, length):
    """Return the data set's lists with an entry for each item, as checksums by name.

    Paths and labels tell data sets apart whose items are transformed at random.
    """
    found = {}
    for name, value in getattr(data, "__dict__", {}).items():
        if isinstance(value, list | tuple) and len(value) == length <= MAX_ITEMS:
            with suppress(Exception):  # what has no contents
                found[name] = zlib.crc32(repr(digest(value)).encode())
    return found


def chooses(sampler):
    """Return whether it is a sampler of the script, which may leave samples out."""
    iterate = getattr(type(sampler), "__iter__", None)
    code = getattr(iterate, "__code__", None)
    ours = code is not None and is_library(code.co_filename)
    return sampler is not None and not ours


def trains(loop):
    return loop.steps > 0 or loop.last > loop.first


def indices_of(batch):
    """Return the list of indices; raise an error if it holds something else."""
    found = torch.as_tensor(batch)
    if found.dim() > 1 or found.is_floating_point() or found.dtype == torch.bool:
        raise ValueError("pairs, for example of a switch and an index")
    return found.flatten().tolist()


def finished_loop(old, done, trained, workers):
    """Return [what a loop over a loader dealt out], or [] if it has no indices.

    workers: the states of its workers' random number generators, by worker.
    """
    sampler = getattr(old.loader.batch_sampler, "sampler", old.loader.sampler)
    try:
        dealt = [indices_of(batch) for batch in old.dealt]
    except (TypeError, ValueError, RuntimeError):
        return []
    dealt = dealt[: int(min(old.length, len(dealt)))]  # some go on for ever
    new = SimpleNamespace(**{name: getattr(old, name) for name in KEPT})
    new.order = new.items = [i for batch in dealt for i in batch]
    subset = isinstance(sampler, SubsetRandomSampler)
    new.sets = [{*map(int, sampler.indices)}] if subset else []
    new.trains = trains(old)
    for level in old.subsets:
        new.items = [int(level[i]) for i in new.items]
        new.sets = [{int(level[i]) for i in s} for s in new.sets]
        new.sets.append({*map(int, level)})
    new.sets.append({*range(old.base_length)})
    new.base = f"{old.base_length} {type(old.data).__name__}"
    new.whole = old.exhausted or old.batches >= old.length
    new.batch = max([1, *map(len, dealt)])
    parts = old.loader, old.loader.batch_sampler, sampler
    new.drops = any(getattr(part, "drop_last", False) for part in parts)
    new.replaces = getattr(sampler, "replacement", False)
    new.chooses = any(map(chooses, (sampler, old.loader.batch_sampler)))
    new.shards = isinstance(sampler, DistributedSampler)
    new.also_trains = id(old.loader) in trained and not new.trains
    new.workers = workers
    new.sample = fingerprint(old) if done and new.trains else None
    new.collated = new.sample and fingerprint(old, collated=True)
    names = {name for states in workers.values() for name in states}
    new.random = [
        name for name in names if fingerprint(old, [name]) not in (None, new.sample)
    ]
    new.lists = list_checksums(old.data, old.base_length)
    return [new]
