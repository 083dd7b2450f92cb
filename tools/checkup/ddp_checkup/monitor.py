"""A thread in each rank that notices hangs and sends its record to rank 0."""

import json
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist

from ddp_checkup.finished import finished_record
from ddp_checkup.hooks.collectives import stop_job
from ddp_checkup.record import EXIT, is_library, record, state, user_line
from ddp_checkup.report import report

# FSDP and DTensors call functional collectives, which have no hooks.
COLLECTIVES = "/_functional_collectives.py", "/distributed_c10d.py"


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
    stop = "" if state.end else json.loads(store.get("stop"))[0]
    store.set(f"read{state.rank}", "")  # no rank needs the store after this
    if state.owns_store:
        # Until the others have read it, unless one was killed after its own record.
        sent = [r for r in range(state.world) if store.check([f"record{r}"])]
        with suppress(dist.DistStoreError):
            store.wait([f"read{r}" for r in sent], timedelta(seconds=10))
    if stop == "failed":  # torchrun ends this rank
        time.sleep(10)
    if not state.end:  # it hangs
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
