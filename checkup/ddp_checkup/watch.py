"""A thread in each rank that notices hangs, and that sends the trace to rank 0."""

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

from ddp_checkup.launch import INTERRUPTED
from ddp_checkup.trace import Line, is_library, trace, user_line

EXIT = os._exit  # run.py replaces os._exit() for the script
PART = 1 << 20  # bytes of a trace that are sent at once
OWN_RANK = (
    "Pass every process its own rank, and the number of all processes: torchrun "
    "sets RANK and WORLD_SIZE, srun sets SLURM_PROCID and SLURM_NTASKS."
)
# FSDP and DTensors call functional collectives, which no hook wraps.
COLLECTIVES = "/_functional_collectives.py", "/distributed_c10d.py"


def reset():
    """Forget the store and the thread, in a new process and in a forked one."""
    global store, thread
    store = None  # where the ranks of this job meet; None until then
    thread = None  # this rank's Watch


def start(options, new_store, owns_store=False):
    """Begin to watch this rank; owns_store: whether this rank holds the store."""
    global store, thread
    store = new_store
    thread = Watch(options, owns_store)
    thread.start()


def stop_job(check_name, line, text, fix=None):
    """Tell all ranks why the job cannot go on; the first reason counts.

    check_name: the check that reports this finding, or "failed".
    """
    store.compare_set("stop", "", json.dumps([check_name, line, text, fix]))


def read_stop():
    """Return the arguments of stop_job(), or None if nothing stopped the job."""
    if not store.check(["stop"]):
        return None
    name, line, text, fix = json.loads(store.get("stop"))
    return name, line and Line(*line), text, fix


class Watch(threading.Thread):
    def __init__(self, options, owns_store):
        super().__init__(daemon=True)
        self.options, self.owns_store = options, owns_store
        self.main = threading.main_thread().ident
        # The script may replace sys.stdout, and prints.Tee would read the report.
        self.stdout = getattr(sys.stdout, "stream", sys.stdout)
        self.ended = ""  # "done", "stopped" (by --steps) or "failed"
        self.status = 0  # the report's exit status
        self.told = False  # whether a long wait was reported
        self.interrupts, writes = os.pipe()
        os.set_blocking(self.interrupts, False)
        os.set_blocking(writes, False)
        with suppress(ValueError):  # raised outside the main thread
            signal.set_wakeup_fd(writes, warn_on_full_buffer=False)

    def end(self, how):
        """Wait for the report; return the exit status."""
        self.ended = how
        self.join()
        return self.status

    def run(self):
        try:
            self.watch()
            self.send_trace()
            self.finish()
        except Exception as error:  # the main thread may wait for ever
            if not isinstance(error, dist.DistError):
                sys.__stderr__.write(traceback.format_exc())
            elif self.ended == "failed":  # the main thread ends with its own error
                self.status = 1
                return
            else:  # the process with the store has ended
                text = "Checkup: no report, see the other ranks' errors\n"
                sys.__stderr__.write(text)
            EXIT(3)

    def watch(self):
        """Wait for the end of the script, or until a rank stops the job."""
        last, moved, cpu = None, time.monotonic(), time.process_time()
        while not self.ended and not store.check(["stop"]):
            time.sleep(0.2)
            self.leave_if_interrupted()
            frame = sys._current_frames().get(self.main)
            now = trace.activity, frame and (frame.f_code, frame.f_lasti)
            computes = time.process_time() - cpu > 0.1 and not trace.waiting
            cpu = time.process_time()
            if now != last or computes:
                last, moved = now, time.monotonic()
            idle = time.monotonic() - moved
            call = trace.waiting or trace.calling
            waits = bool(call) or is_in_collective(frame)
            place = f"{f'in {call} ' if call else ''}at {user_line(frame)}"
            store.set(f"beat{trace.rank}", json.dumps([waits, idle, place]))
            if idle > min(5, self.options.hang_timeout):
                self.find_hang(idle, waits, place)

    def leave_if_interrupted(self):
        """End soon after Ctrl-C, also where the rank waits in PyTorch's C++ code."""
        if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
            return  # the script handles Ctrl-C itself
        with suppress(BlockingIOError):
            if signal.SIGINT in os.read(self.interrupts, 1000):
                time.sleep(3)
                EXIT(INTERRUPTED)

    def find_hang(self, idle, waits, place):
        """Stop the job if this rank waits for one that has ended, or if all wait."""
        ranks = range(trace.world_size)
        left = [r for r in ranks if store.check([f"trace{r}"])]
        for r in left:
            collectives = int(store.get(f"trace{r}").split()[1])
            if waits and collectives < len(trace.of("collective")):
                text = f"rank {trace.rank} waits {place}, but rank {r} has ended"
                return stop_job("collectives", None, text)
        here = [r for r in ranks if r not in left]
        keys, timeout = [f"beat{r}" for r in here], self.options.hang_timeout
        if idle <= timeout or not store.check(keys):
            return None
        beats = [json.loads(beat) for beat in store.multi_get(keys)]
        places = [f"rank {r} is {b[2]}" for r, b in zip(here, beats, strict=True)]
        text = f"{', '.join(places)}, since {idle:.0f} s"
        if all(waits and idle > timeout for waits, idle, _ in beats):
            in_group = all("in init_process_group(" in beat[2] for beat in beats)
            return stop_job("collectives", None, text, in_group and OWN_RANK)
        if all(idle > 5 * timeout for _, idle, _ in beats):
            return stop_job("failed", None, text)
        waiting = [r for r, beat in zip(here, beats, strict=True) if beat[0]]
        is_first = waiting[:1] == [trace.rank]
        if is_first and len(waiting) < len(here) and not self.told:
            self.told = True  # the others compute, which may be right
            sys.__stderr__.write(f"Checkup: {text}; it goes on\n")

    def send_trace(self):
        """Write the trace into the store, in parts."""
        from ddp_checkup import hooks  # hooks import this module

        blob = pickle.dumps(hooks.finish(self.ended == "done"))
        starts = range(0, len(blob), PART)
        for number, begin in enumerate(starts):
            store.set(f"trace{trace.rank}/{number}", blob[begin : begin + PART])
        collectives = len(trace.of("collective"))
        store.set(f"trace{trace.rank}", f"{len(starts)} {collectives}")

    def finish(self):
        """Let rank 0 report; end a rank that hangs, or that another rank stopped."""
        if trace.rank == 0:
            from ddp_checkup.report import report

            status = report(self.options, gather(), read_stop(), self.stdout)
            store.set("status", str(status))
        while not store.check(["status"]):
            time.sleep(0.1)
        self.status = int(store.get("status"))
        stop = read_stop()
        store.set(f"read{trace.rank}", "")  # this rank no longer needs the store
        if self.owns_store:
            # Keep the store until the others have read the status. The wait has a
            # limit, as a rank may be killed after it has sent its trace.
            sent = [r for r in range(trace.world_size) if store.check([f"trace{r}"])]
            with suppress(dist.DistStoreError):
                store.wait([f"read{r}" for r in sent], timedelta(seconds=10))
        if not self.ended:
            if stop[0] == "failed":  # the launcher ends this rank
                time.sleep(10)
            EXIT(self.status)


def is_in_collective(frame):
    """Return whether this thread is in PyTorch's code for collectives."""
    while frame and is_library(frame.f_code.co_filename):
        if frame.f_code.co_filename.endswith(COLLECTIVES):
            return True
        frame = frame.f_back
    return False


def gather():
    """Return the ranks' traces, None for a rank that sends none after a stop."""
    traces, deadline = [None] * trace.world_size, float("inf")
    while None in traces and time.monotonic() < deadline:
        if store.check(["stop"]):
            deadline = min(deadline, time.monotonic() + 10)
        for r in range(trace.world_size):
            if traces[r] is None and store.check([f"trace{r}"]):
                parts = range(int(store.get(f"trace{r}").split()[0]))
                blob = b"".join(store.get(f"trace{r}/{i}") for i in parts)
                traces[r] = pickle.loads(blob)
        time.sleep(0.05)
    return traces


reset()
