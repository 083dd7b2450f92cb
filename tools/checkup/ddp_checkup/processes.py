"""Processes under the hooks: a launcher's ranks, and those of mp.spawn."""

import functools
import os
import re
import runpy
import sys
import time
import traceback
from contextlib import suppress
from multiprocessing.process import BaseProcess

import torch.distributed as dist
from torch.distributed import device_mesh
from torch.multiprocessing import ProcessExitedException, ProcessRaisedException

from ddp_checkup import hooks, monitor
from ddp_checkup.hooks.collectives import note_unused, stop_job
from ddp_checkup.hooks.numbers import Tee
from ddp_checkup.hooks.shared import rebind, wrap
from ddp_checkup.hooks.steps import StopAfterSteps
from ddp_checkup.record import (
    EXIT,
    INTERRUPTED,
    is_library,
    record,
    state,
    user_line,
)

TORCHRUN = "RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"

WRITES_SOON = 5  # seconds that a missing file is waited for


class NeedsRanks(BaseException):
    """The script makes its process group in the process that the user started."""


def run_script(options):
    if options.module:
        runpy.run_module(options.script, run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(state.script, run_name="__main__")


def run_launched(options):
    """Run the script in a rank that torchrun or another launcher has started."""
    state.rank, state.world = (int(os.environ[n]) for n in ("RANK", "WORLD_SIZE"))
    monitor.start(options)
    return run_rank(options, lambda: run_script(options))


def run_rank(options, function):
    """Run a script or a spawned function under the hooks; return its status."""
    hooks.install()
    for module in (dist, device_mesh):
        join = functools.partial(join_group, options)
        wrap(module, "init_process_group", compare_addresses, join)
    rebind()
    stdout, stderr = state.stdout, _ = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = Tee(stdout), Tee(stderr)
    os._exit = functools.partial(leave, os.getpid())
    end = "done"
    try:
        function()
    except StopAfterSteps:
        end = "stopped"
    except KeyboardInterrupt:
        EXIT(INTERRUPTED)
    except SystemExit as error:
        cause = error.__context__ if state.address else None  # mp.spawn caught it
        if error.code:
            fail_rank(cause or error)
            if cause and state.store:
                print_error(cause)
            raise
    except BaseException as error:
        fail_rank(error)
        print_error(error)
        return 1
    sys.stdout, sys.stderr = stdout, stderr
    return end_rank(end)


def end_rank(end):
    """Wait for the report; return the status."""
    state.stdout.flush()
    if state.store is None:  # a spawned process that made no process group
        return 0
    state.end = end
    state.thread.join()
    if end == "stopped":  # the group is open, and would complain
        EXIT(state.status)
    return state.status


def leave(process, status):
    """Do what os._exit() does, after the report."""
    if os.getpid() == process and not state.end:
        status = end_rank("done") or status
    EXIT(status)


def print_error(error):
    """Print the traceback without the frames above the user's."""
    frames = error.__traceback__
    while frames and is_library(frames.tb_frame.f_code.co_filename):
        frames = frames.tb_next
    error = error.with_traceback(frames)
    sys.__stderr__.write("".join(traceback.format_exception(error)))


def fail_rank(error):
    """Report what was seen before an error of the script."""
    state.fails = True
    note_unused(str(error))
    if not state.store:
        return
    alone = False  # whether it fails by a file, and others do not
    no_parent = re.search("Parent directory (.+) does not exist", str(error))
    if isinstance(error, FileExistsError | FileNotFoundError) or no_parent:
        *_, (frame, _) = traceback.walk_tb(error.__traceback__)
        path = f"{no_parent[1]}/file" if no_parent else f"{error.filename}"
        record.failed_at = user_line(frame), os.path.abspath(path)
        alone = state.steps or not all_fail()
    state.end = "failed" if state.steps or record.unused or alone else "unseen"
    if state.end == "failed":
        with suppress(dist.DistError):  # the process with the store has ended
            stop_job("failed", f"Rank {state.rank} failed")
    state.thread.join()  # in a store's call it would abort Python's exit


def compare_addresses(name, values):
    """End a spawned rank that would meet the others where they are not."""
    if not state.address or state.store is not None:
        return
    (host, port), job = state.address
    store = dist.PrefixStore(f"address{job}", dist.TCPStore(host, port, None, False))
    urls = [v for v in values if isinstance(v, str) and "://" in v]
    env = [os.environ.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT")]
    mine = urls[0] if urls and not urls[0].startswith("env") else ":".join(env)
    others = store.compare_set("address", "", mine).decode()
    if others != mine:
        text = f"one rank waits at {others}, and another at {mine}"
        print(f"Error: {text}. Choose the port before mp.spawn()", file=sys.stderr)
        EXIT(1)


def all_fail():
    """Return whether all ranks fail; else another may soon write a missing file."""
    keys = [f"fails{rank}" for rank in range(state.world)]
    deadline = time.monotonic() + WRITES_SOON
    with suppress(dist.DistError):  # the process with the store has ended
        state.store.set(f"fails{state.rank}", "")
        while not state.store.check(keys):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.1)
    return True


def join_group(options, result, values):
    """Start to monitor a spawned rank: it has learnt its number."""
    state.grouped = True
    if state.store is None:
        state.rank, state.world = dist.get_rank(), dist.get_world_size()
        monitor.start(options, *state.address)


def run_spawned(target, options, setup, *args, **kwargs):
    """Run the target of a process that a script starts, under the hooks."""
    hooks.reset()
    vars(state).update(setup)
    sys.exit(run_rank(options, lambda: target(*args, **kwargs)))


def refuse_group(process, original, *args, **kwargs):
    """Do what init_process_group() does, but not in the parent of all ranks."""
    if os.getpid() == process:
        raise NeedsRanks
    return original(*args, **kwargs)


def run_parent(options):
    """Run a script that starts its ranks itself, by mp.spawn; return the status."""
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    running, jobs = [], 0
    setup = {n: getattr(state, n) for n in ("script", "max_steps", "main_prefix")}
    start_process, make_group = BaseProcess.start, dist.init_process_group

    def start(process):
        nonlocal jobs
        target = process._target
        name = getattr(target, "__module__", "")
        if target and not name.startswith(("torch.utils.data", "multiprocessing")):
            if not any(p.is_alive() for p in running):  # the next job of this script
                running.clear()
                jobs += 1
            own = setup | {"address": (("127.0.0.1", store.port), jobs)}
            process._target = functools.partial(run_spawned, target, options, own)
            running.append(process)
        return start_process(process)

    BaseProcess.start = start
    refuse = functools.partial(refuse_group, os.getpid(), make_group)
    dist.init_process_group = device_mesh.init_process_group = refuse
    error = None
    try:
        run_script(options)
    except KeyboardInterrupt:
        print("Stopped.", file=sys.stderr)
        return INTERRUPTED
    except (ProcessExitedException, ProcessRaisedException) as failure:
        error = str(failure).strip()
    except (NeedsRanks, SystemExit) as end:
        if jobs and getattr(end, "code", None):
            raise
    except KeyError as failure:
        if jobs or failure.args[0] not in TORCHRUN:
            print_error(failure)
            return 1
        error = f"{options.script} reads {failure}, which torchrun sets; add -n 2"
    except Exception as failure:
        print_error(failure)
        return 1
    finally:
        BaseProcess.start = start_process
        dist.init_process_group = device_mesh.init_process_group = make_group
    keys = [f"checkup{job}/status" for job in range(1, jobs + 1)]
    statuses = [int(store.get(key)) for key in keys if store.check([key])]
    if not statuses:
        text = f"{options.script} made no process group; put -n 2 before its name"
        print(f"Error: {error or text}", file=sys.stderr)
    return max(statuses, default=2)
