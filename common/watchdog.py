"""In each process: reports where it hangs, and ends it after DDP_TIMEOUT seconds."""

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
# Code that a script calls: Python's, of which some is "<frozen ...>", and ours.
LIBRARIES = "<", sysconfig.get_path("stdlib"), os.path.dirname(__file__)
last_step = patience = None  # None: nothing is watched


def heartbeat(seconds=30):
    """Note that this process makes progress; without more of it, it hangs.

    After so many seconds a line says where, and after DDP_TIMEOUT the process ends.
    A notebook may rest: there, this does nothing.
    """
    global last_step, patience
    now = time.monotonic()
    if last_step is None and hasattr(__main__, "__file__"):
        last_step = -1
        threading.Thread(target=watch, args=[os.getppid()], daemon=True).start()
    if last_step is not None and now - last_step > 1:  # to set this takes 0.1 ms
        last_step, patience = now, min(seconds, TIMEOUT / 2)
        # It needs no GIL. Later ranks wait longer: one traceback is enough.
        faulthandler.dump_traceback_later(TIMEOUT + int(RANK or 0), exit=True)


def stop():
    """Watch no longer: the result is written."""
    global last_step
    last_step = float("inf")
    faulthandler.cancel_dump_traceback_later()


def watch(parent):
    """Report a hang, once a minute; end a rank whose launcher was killed."""
    who, reported = f"rank {RANK}: " if RANK else "", 0
    while True:
        time.sleep(1)
        if RANK and os.getppid() != parent:
            os._exit(1)
        now = time.monotonic()
        if now - last_step > patience and now - reported > 60:
            reported = now
            text = f"{who}no step for {now - last_step:.0f} s, at {find_line()}"
            print(text, file=sys.stderr, flush=True)


def find_line():
    """Return where the main thread is: the innermost line of the script's code."""
    frame = sys._current_frames()[threading.main_thread().ident]
    while frame.f_back and is_library(frame.f_code.co_filename):
        frame = frame.f_back
    file, line = frame.f_code.co_filename, frame.f_lineno
    return f"{os.path.basename(file)}:{line} {linecache.getline(file, line).strip()}"


def is_library(file):
    """Return whether a file is no code of the script; a cluster has many folders."""
    return file.startswith(LIBRARIES) or "-packages/" in file
