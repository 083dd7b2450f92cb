"""The meaning of the indices that a loader dealt out: fields of `loop` events.

When the script has ended, these are added to the first loops over every loader:

    has_items    whether the loop has the fields below
    order        indices as dealt
    items        the same samples, as indices of the data set below all Subsets
    sets         sets of items to choose from, one for every level of Subsets
    whole        whether the loop came to its end
    batch_size   size of the batches
    drops        whether a sampler drops samples that do not fill a batch
    replaces     whether it draws with replacement
    chooses      whether the script wrote the sampler
    shards       whether it is a DistributedSampler
    trains       whether an optimizer made steps within the loop
    also_trains  whether an optimizer made steps in another loop over this loader
    sample       contents of some items, None if they vary from call to call
    collated     contents of batches that the loader's collate_fn makes of them
    lists        checksums of the data set's lists with one entry per item
    workers      states of the workers' random number generators
    random       generators that change the items
"""

import random
import sys
import zlib
from collections import Counter
from contextlib import suppress

import torch
from torch.utils._pytree import tree_flatten
from torch.utils.data import DistributedSampler, SubsetRandomSampler

from ddp_checkup.hooks.checksums import checksum, has_bits
from ddp_checkup.hooks.loops import read_worker_notes
from ddp_checkup.trace import is_library, trace

MAX_EPOCHS = 3  # of each loop
MAX_ITEMS = 200_000  # of a data set whose lists are compared
PLAIN = str, bytes, int, float, complex, torch.dtype
GENERATORS = "PyTorch's generator", "Python's random", "NumPy's generator"


def digest(item):
    """Return the contents of an item: equal items may have different pickles."""
    if has_bits(item):
        return tuple(item.shape), int(checksum(item))
    if item is None or isinstance(item, PLAIN):
        return item
    if hasattr(item, "__fspath__"):
        return str(item)
    if hasattr(item, "tobytes"):  # an array or an image
        return zlib.crc32(item.tobytes())
    if hasattr(item, "to_dict"):  # a graph of PyTorch Geometric
        item = item.to_dict()
    leaves, structure = tree_flatten(item)
    if leaves and leaves[0] is item:  # an object with attributes
        leaves = sorted(vars(item).items())
    return str(structure), [digest(leaf) for leaf in leaves]


def seed_all(changed):
    """Seed the generators in `changed` with 1, and the others with 0."""
    seeds = [int(name in changed) for name in GENERATORS]
    torch.manual_seed(seeds[0])
    random.seed(seeds[1])
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seeds[2])


def fingerprint(loop, changed=(), collated=False):
    """Return the contents of some items; None if they vary from call to call.

    changed: generators that get another seed. collated: whether to collate items.
    """
    loader, _, _, data = loop.source
    found = []
    try:
        for i in [*range(0, loop.base_length, loop.base_length // 8 + 1)] * 2:
            seed_all(changed)
            item = data[i]
            if collated:
                item = [item] if loader.batch_sampler is not None else item
                item = loader.collate_fn(item)
            found.append(digest(item))
    except Exception:  # the data set may be closed, or its items unreadable
        return None
    half = len(found) // 2
    return found[:half] if found[:half] == found[half:] else None


def list_checksums(data, length):
    """Return checksums of the data set's lists with one entry per item, by name.

    Paths and labels tell data sets apart whose items are transformed at random.
    """
    found = {}
    for name, value in getattr(data, "__dict__", {}).items():
        if isinstance(value, list | tuple) and len(value) == length <= MAX_ITEMS:
            with suppress(Exception):  # an entry may be unreadable
                found[name] = zlib.crc32(repr(digest(value)).encode())
    return found


def is_of_script(sampler):
    """Return whether the script wrote this sampler, which may leave samples out."""
    code = getattr(getattr(type(sampler), "__iter__", None), "__code__", None)
    return sampler is not None and not (code and is_library(code.co_filename))


def indices_of(batch):
    """Return the indices; raise an error if the batch holds something else."""
    found = torch.as_tensor(batch)
    if found.dim() > 1 or found.is_floating_point() or found.dtype == torch.bool:
        raise ValueError("pairs, for example of a switch and an index")
    return found.flatten().tolist()


def add_items(loop, done, workers):
    """Add the fields listed above; return False if there are no indices.

    done: whether the script has ended, so that its data set may be read.
    """
    loader, sampler, subsets, data = loop.source
    try:
        dealt = [indices_of(batch) for batch in loop.dealt]
    except (TypeError, ValueError, RuntimeError):
        return False
    dealt = dealt[: int(min(loop.length, len(dealt)))]  # some loaders never end
    loop.order = loop.items = [i for batch in dealt for i in batch]
    is_subset = isinstance(sampler, SubsetRandomSampler)
    loop.sets = [{*map(int, sampler.indices)}] if is_subset else []
    for level in subsets:
        loop.items = [int(level[i]) for i in loop.items]
        loop.sets = [{int(level[i]) for i in part} for part in loop.sets]
        loop.sets.append({*map(int, level)})
    loop.sets.append({*range(loop.base_length)})
    loop.base = f"{loop.base_length} {type(data).__name__}"
    loop.whole = loop.exhausted or loop.batches >= loop.length
    loop.batch_size = max([1, *map(len, dealt)])
    parts = loader, loader.batch_sampler, sampler
    loop.drops = any(getattr(part, "drop_last", False) for part in parts)
    loop.replaces = getattr(sampler, "replacement", False)
    loop.chooses = any(map(is_of_script, (sampler, loader.batch_sampler)))
    loop.shards = isinstance(sampler, DistributedSampler)
    loop.workers = workers
    loop.lists = list_checksums(data, loop.base_length)
    loop.sample = fingerprint(loop) if done and loop.trains else None
    loop.collated = loop.sample and fingerprint(loop, collated=True)
    drawn = {name for states in workers.values() for name in states}
    loop.random = [
        name
        for name in drawn
        if fingerprint(loop, [name]) not in (None, loop.sample)
    ]
    return True


def finish(done):
    """Complete this rank's loop events; the first few of every loop get items."""
    loops, seen = trace.of("loop"), Counter()
    for loop in loops:
        loop.trains = loop.steps > 0 or loop.last > loop.first
    trained = {id(loop.source[0]) for loop in loops if loop.trains}
    notes = read_worker_notes()
    for number, loop in enumerate(loops):
        seen[loop.key, loop.trains] += 1
        few = seen[loop.key, loop.trains] <= MAX_EPOCHS
        loop.also_trains = id(loop.source[0]) in trained and not loop.trains
        workers = notes.get(number, {})
        loop.has_items = bool(
            loop.base_length and few and add_items(loop, done, workers)
        )
    for loop in loops:
        if not (loop.trains and loop.number <= MAX_EPOCHS):
            loop.samples = {}
        del loop.source, loop.iterator, loop.latest, loop.dealt
