"""Watchdog: reports where a process hangs, and ends it after DDP_TIMEOUT seconds."""

import faulthandler
import linecache
import os
import sys
import sysconfig
import threading
import time

import __main__

RANK = os.environ.get("RANK")
TIMEOUT = int(os.environ.get("DDP_TIMEOUT") or 540)  # NCCL gives up after 600 s
# Paths of library code: Python's (some is "<frozen ...>") and ours.
LIBRARIES = "<", sysconfig.get_path("stdlib"), os.path.dirname(__file__)
last_step = patience = None  # None: nothing is watched


def heartbeat(seconds=30):
    """Note that this process makes progress.

    After `seconds` without another call, a line says where the process hangs. After
    DDP_TIMEOUT the process ends. In a notebook this does nothing.
    """
    global last_step, patience
    now = time.monotonic()
    if last_step is None and hasattr(__main__, "__file__"):
        last_step = -1
        threading.Thread(target=watch, args=[os.getppid()], daemon=True).start()
    # Not in each step: setting the timer takes 0.1 ms.
    if last_step is not None and now - last_step > 1:
        last_step, patience = now, min(seconds, TIMEOUT / 2)
        # This needs no GIL. Later ranks wait longer, since one traceback is enough.
        faulthandler.dump_traceback_later(TIMEOUT + int(RANK or 0), exit=True)


def stop():
    """Stop watching."""
    global last_step
    last_step = float("inf")
    faulthandler.cancel_dump_traceback_later()


def watch(parent):
    """Report a hang every minute; end a rank whose launcher was killed."""
    prefix, reported = f"rank {RANK}: " if RANK else "", 0
    while True:
        time.sleep(1)
        if RANK and os.getppid() != parent:
            os._exit(1)
        now = time.monotonic()
        if now - last_step > patience and now - reported > 60:
            reported = now
            text = f"{prefix}no step for {now - last_step:.0f} s, at {find_line()}"
            print(text, file=sys.stderr, flush=True)


def find_line():
    """Return the innermost line of the script that the main thread is executing."""
    frame = sys._current_frames()[threading.main_thread().ident]
    while frame.f_back and is_library(frame.f_code.co_filename):
        frame = frame.f_back
    file, line = frame.f_code.co_filename, frame.f_lineno
    return f"{os.path.basename(file)}:{line} {linecache.getline(file, line).strip()}"


def is_library(file):
    """Return whether a file is no code of the script; a cluster has many folders."""
    return file.startswith(LIBRARIES) or "-packages/" in file
