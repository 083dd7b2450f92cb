"""A thread in each rank that notices hangs and sends its record to rank 0."""

import json
import os
import pickle
import random
import signal
import sys
import threading
import time
import traceback
import zlib
from collections import Counter, defaultdict
from contextlib import suppress
from datetime import timedelta
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_flatten, tree_map_only
from torch.utils.data import DistributedSampler, SubsetRandomSampler

from ddp_checkup.hooks.collectives import stop_job
from ddp_checkup.hooks.loaders import read_worker_notes
from ddp_checkup.hooks.modules import STATISTICS, note_tensors
from ddp_checkup.hooks.shared import checksums
from ddp_checkup.hooks.steps import schedules
from ddp_checkup.record import EXIT, is_library, record, state, user_line
from ddp_checkup.report import report

FRAMEWORKS = "lightning", "pytorch_lightning", "transformers.trainer", "accelerate"
ON_DEVICE = "start", "gradients", "weights", "inputs", "batches", "clips", "shards"
ON_DEVICE += "tensors", "first", "scales", "losses", "sums", "samples", "overwritten"
ON_DEVICE += "class_weights", "given", "contrasts", "undivided", "divisors"
# FSDP and DTensors call functional collectives, which have no hooks.
COLLECTIVES = "/_functional_collectives.py", "/distributed_c10d.py"
MAX_EPOCHS = 3  # of each loop
MAX_ITEMS = 200_000  # of a data set whose lists are compared
KEPT = "key", "line", "first", "gathered", "reduced", "printed"
PLAIN = str, bytes, int, float, complex, os.PathLike, torch.dtype


def start(options, address=None, generation=0):
    """Meet the other ranks at a store, and watch this one.

    address: (host, port) of the store of a parent process; torchrun has one already.
    Without both, rank 0 opens the store that init_process_group() will share.
    """
    if address:
        store = dist.TCPStore(*address, None, False)
    else:
        agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        owner = state.owns_store = state.rank == 0 and not agent
        store = dist.TCPStore(host, port, None, owner, multi_tenant=True)
    state.store = dist.PrefixStore(f"checkup{generation}", store)
    state.interrupts, writes = os.pipe()
    os.set_blocking(state.interrupts, False)
    os.set_blocking(writes, False)
    with suppress(ValueError):  # not in the main thread
        signal.set_wakeup_fd(writes, warn_on_full_buffer=False)
    main = threading.main_thread().ident
    state.thread = threading.Thread(target=run, args=[options, main], daemon=True)
    state.thread.start()


def run(options, main):
    try:
        watch(options, main)
        if state.end != "unseen":
            send_record()
            finish(options)
    except Exception as error:  # the main thread may wait for ever
        text = traceback.format_exc()
        if isinstance(error, dist.DistError):  # the process with the store ended
            if state.fails:  # the main thread ends this rank with its own error
                return
            text = "Checkup: no report, see the other ranks' errors\n"
        sys.__stderr__.write(text)
        EXIT(3)


def watch(options, main):
    """Wait for the end of the script, or for a hang."""
    store, last, moved = state.store, None, time.monotonic()
    cpu = time.process_time()
    while not state.end and not store.check(["stop"]):
        time.sleep(0.2)
        leave_if_interrupted()
        frame = sys._current_frames().get(main)
        where = frame and (frame.f_code, frame.f_lasti)
        computes = time.process_time() - cpu > 0.1 and not state.waiting
        cpu = time.process_time()
        if (state.events, where) != last or computes:
            last, moved = (state.events, where), time.monotonic()
        idle = time.monotonic() - moved
        call = state.waiting or state.busy
        waits = bool(call) or is_in_collective(frame)
        place = f"{call and f'in {call} '}at {user_line(frame)}"
        store.set(f"beat{state.rank}", json.dumps([waits, idle, place]))
        if idle > min(5, options.hang_timeout):
            find_hang(options, idle, waits, place)


def leave_if_interrupted():
    """End soon after Ctrl-C; a rank that waits in PyTorch's C++ code would not."""
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        return  # the script has its own
    with suppress(BlockingIOError):
        if signal.SIGINT in os.read(state.interrupts, 1000):
            time.sleep(3)
            EXIT(128 + signal.SIGINT)


def is_in_collective(frame):
    """Return whether this thread is in PyTorch's code for collectives."""
    while frame and is_library(frame.f_code.co_filename):
        if frame.f_code.co_filename.endswith(COLLECTIVES):
            return True
        frame = frame.f_back
    return False


def find_hang(options, idle, waits, place):
    """Stop the job if this rank waits for others, or no rank does anything."""
    store, ranks = state.store, range(state.world)
    left = [r for r in ranks if store.check([f"record{r}"])]
    for r in left:
        number = int(store.get(f"record{r}").split()[1])
        if waits and number < record.counts.total():
            text = f"rank {state.rank} waits {place}, but rank {r} has ended"
            stop_job("collectives", text)
            return
    here = [r for r in ranks if r not in left]
    beats = [f"beat{r}" for r in here]
    if idle > options.hang_timeout and store.check(beats):
        others = [json.loads(beat) for beat in store.multi_get(beats)]
        places = [f"rank {r} is {b[2]}" for r, b in zip(here, others, strict=True)]
        text = f"{', '.join(places)}, since {idle:.0f} s"
        waiting = [r for r, b in zip(here, others, strict=True) if b[0]]
        if all(b[0] and b[1] > options.hang_timeout for b in others):
            stop_job("collectives", text)
        elif all(b[1] > 5 * options.hang_timeout for b in others):
            stop_job("failed", text)
        elif waiting[:1] == [state.rank] and not state.noticed:
            state.noticed = True  # the others compute, which may be right
            sys.__stderr__.write(f"Checkup: {text}; it goes on\n")


def finish(options):
    """Print the report on rank 0; end a rank that hangs."""
    store = state.store
    if state.rank == 0:
        store.set("status", str(report(options, *gather(store))))
    while not store.check(["status"]):
        time.sleep(0.1)
    state.status = int(store.get("status"))
    hangs = not state.end
    # torchrun ends a rank that has not failed itself
    waits = hangs and json.loads(store.get("stop"))[0] == "failed"
    store.set(f"read{state.rank}", "")  # no rank needs the store after this
    if state.owns_store:
        # Until the others have read it, unless one was killed after its own record.
        sent = [r for r in range(state.world) if store.check([f"record{r}"])]
        with suppress(dist.DistStoreError):
            store.wait([f"read{r}" for r in sent], timedelta(seconds=10))
    if hangs:
        if waits:
            time.sleep(10)
        EXIT(state.status)


def send_record():
    """Write the record into the store, in parts of a megabyte."""
    blob = pickle.dumps(finished_record(state.end == "done"))
    parts = range(0, len(blob), 1 << 20)
    for i in parts:
        state.store.set(f"record{state.rank}/{i >> 20}", blob[i : i + (1 << 20)])
    state.store.set(f"record{state.rank}", f"{len(parts)} {record.counts.total()}")


def gather(store):
    """Return the ranks' records, None if there is none, and why the job stopped."""
    ranks, deadline = [None] * state.world, float("inf")
    while None in ranks and time.monotonic() < deadline:
        if store.check(["stop"]):
            deadline = min(deadline, time.monotonic() + 10)
        for r in range(state.world):
            if ranks[r] is None and store.check([f"record{r}"]):
                parts = range(int(store.get(f"record{r}").split()[0]))
                blob = b"".join(store.get(f"record{r}/{i}") for i in parts)
                ranks[r] = pickle.loads(blob)
        time.sleep(0.05)
    return ranks, json.loads(store.get("stop")) if store.check(["stop"]) else None


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
