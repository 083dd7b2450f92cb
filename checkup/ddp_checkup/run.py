"""Runs the script under the hooks, in a launcher's rank or in one of mp.spawn."""

import functools
import os
import re
import runpy
import sys
import traceback
from contextlib import suppress
from importlib.util import find_spec
from multiprocessing.process import BaseProcess

import torch
import torch.distributed as dist
from torch.distributed import device_mesh, distributed_c10d
from torch.multiprocessing import ProcessExitedException, ProcessRaisedException

from ddp_checkup import hooks, watch
from ddp_checkup.launch import INTERRUPTED, NUMBERS
from ddp_checkup.trace import HERE, is_library, trace, user_line

# Errors that mp.spawn raises when one of its processes has failed
OF_SPAWN = ProcessExitedException, ProcessRaisedException
# Errors of scripts that need a GPU
NEEDS_GPU = re.compile("nccl|cuda|nvidia|device_ids|set_device|device_count", re.I)
NO_GPU = "No GPU here: README.md lists four edits: 'A GPU script on a laptop'.\n"


class NeedsRanks(BaseException):
    """Raised if the process that the user started makes a process group."""


def run(options):
    """Run the script, and return the exit status."""
    hooks.reset()
    watch.reset()
    trace.script, trace.max_steps = options.path, options.steps
    sys.path[0] = os.getcwd() if options.module else os.path.dirname(options.path)
    if options.module:  # an installed module is the user's code, too
        package = find_spec(options.script.partition(".")[0])
        folders = package.submodule_search_locations
        file = os.path.abspath(package.origin or "")
        trace.package = tuple(folders or [os.path.dirname(file)])
    sys.argv = [options.script, *options.arguments]
    sys.path.append(os.path.dirname(HERE))  # for processes that the script spawns
    return run_launched(options) if options.place else run_parent(options)


def run_script(options):
    if options.module:
        runpy.run_module(options.script, run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(options.path, run_name="__main__")


def run_launched(options):
    """Run the script in a rank that a launcher has started."""
    rank, trace.world_size, host, port = options.place
    trace.rank = rank
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # torchrun's
    owns_store = rank == 0 and not agent
    try:  # init_process_group() may share the port
        store = dist.TCPStore(host, port, None, owns_store, multi_tenant=True)
    except dist.DistNetworkError:
        text = f"Error: rank {rank} cannot meet rank 0 at {host}, port {port};"
        print(f"{text} check MASTER_ADDR and MASTER_PORT", file=sys.stderr)
        return 2
    watch.start(options, dist.PrefixStore("checkup", store), owns_store)
    return run_rank(options, lambda: run_script(options))


def run_rank(options, function, job=None):
    """Run the script, or a spawned function, under the hooks; return the status.

    job: the parent's store if the script started this process, else None.
    """
    wrap_group(options, job)
    hooks.install()
    hooks.rebind()
    store = job or watch.store
    stdout, stderr = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = hooks.prints.Tee(stdout), hooks.prints.Tee(stderr)
    os._exit = functools.partial(leave, os.getpid())
    ended = "done"
    try:
        function()
    except hooks.steps.StopAfterSteps:
        ended = "stopped"
    except KeyboardInterrupt:
        watch.EXIT(INTERRUPTED)
    except SystemExit as error:
        if error.code:
            cause = error.__context__ if job else None  # mp.spawn caught it
            fail(cause or error, store)
            sys.exit(error.code if isinstance(error.code, int) else 1)
        trace.add("exit", line=None)
    except BaseException as error:
        fail(error, store)
        return 1
    sys.stdout, sys.stderr = stdout, stderr
    return end_rank(ended)


def end_rank(ended):
    """Wait for the report; return the status."""
    if watch.store is None:  # this spawned process made no process group
        return 0
    watch.thread.stdout.flush()
    status = watch.thread.end(ended)
    if ended == "stopped":  # the group is open, and would complain
        watch.EXIT(status)
    return status


def leave(process, status):
    """Exit as os._exit() does, but after the report."""
    if os.getpid() == process and not (watch.thread and watch.thread.ended):
        trace.add("exit", line=None)
        status = end_rank("done") or status
    watch.EXIT(status)


def print_error(error, store=None):
    """Print the traceback from the user's first frame on, and where to find help."""
    frames = error.__traceback__
    while frames and is_library(frames.tb_frame.f_code.co_filename):
        frames = frames.tb_next
    for frame in iterate(frames):  # skip the frames of the hooks
        while frame.tb_next and is_hook(frame.tb_next):
            frame.tb_next = frame.tb_next.tb_next
    text = "".join(traceback.format_exception(error.with_traceback(frames)))
    print_once(text, store)
    if NEEDS_GPU.search(text) and not torch.accelerator.is_available():
        print_once(NO_GPU, store)


def iterate(frames):
    while frames:
        yield frames
        frames = frames.tb_next


def is_hook(frame):
    return frame.tb_frame.f_code.co_filename.startswith(HERE)


def print_once(text, store):
    """Print a text, unless another rank has printed it."""
    with suppress(dist.DistError):  # the process with the store has ended
        mine = str(os.getpid())
        if store and store.compare_set(f"print/{text}", "", mine).decode() != mine:
            return
    sys.__stderr__.write(text)
    sys.__stderr__.flush()


def fail(error, store):
    """Print an error of the script, and wait for the report on the steps before."""
    if not isinstance(error, SystemExit):
        print_error(error, store)
    elif isinstance(error.code, str):  # sys.exit("give --data")
        print_once(f"{error.code}\n", store)
    if not watch.store:  # this spawned process made no process group
        store.set("failed", "")
        return
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    line = user_line(frames[-1]) if frames else None
    trace.add("failure", line=line, error=str(error))
    with suppress(dist.DistError):
        watch.stop_job("failed", line, f"rank {trace.rank} failed")
    watch.thread.end("failed")


def wrap_group(options, job):
    """Watch how the script makes its process group, also by init_device_mesh()."""
    before = functools.partial(before_rendezvous, options, job)
    hooks.wrap(distributed_c10d, "rendezvous", before=before)
    after = functools.partial(after_group, options, job)
    for module in (dist, device_mesh):
        hooks.wrap(module, "init_process_group", before_group, after, "waiting")
    hooks.wrap(BaseProcess, "start", before=before_start)


def before_group(name, values):
    trace.add("init", line=user_line(), passed="")


def before_rendezvous(options, job, name, values):
    """Note the rank that this process passes: a hang is reported with it."""
    _, rank, world_size = values[:3]
    rank = int(os.environ.get("RANK", -1)) if rank == -1 else rank
    if world_size == -1:
        world_size = int(os.environ.get("WORLD_SIZE", -1))
    passed = f"rank={rank}, world_size={world_size}"
    trace.of("init")[-1].passed = passed
    trace.waiting = f"init_process_group({passed})"
    if job and rank >= 0:
        join_job(options, job, rank, world_size)


def join_job(options, job, rank, world_size):
    """Begin to watch a spawned rank, which learns its number only now."""
    if not watch.store:
        trace.rank, trace.world_size = rank, world_size
        watch.start(options, job)


def after_group(options, job, result, values):
    if job:  # a script that passes a store makes no rendezvous
        join_job(options, job, dist.get_rank(), dist.get_world_size())
    if not trace.of("group"):
        trace.add("group", line=user_line())


def before_start(name, values):
    if starts_rank(values[0]):
        trace.add("start", line=user_line())


def starts_rank(process):
    """Return whether a process may become a rank: a loader's worker does not."""
    module = getattr(process._target, "__module__", "")
    workers = "torch.utils.data", "multiprocessing"
    return bool(process._target) and not module.startswith(workers)


def run_spawned(target, options, setup, address, *args, **kwargs):
    """Run the target of a process that the script starts, under the hooks."""
    hooks.reset()
    watch.reset()
    vars(trace).update(setup)
    host, port, number = address
    store = dist.TCPStore(host, port, None, False)
    job = dist.PrefixStore(f"job{number}", store)
    sys.exit(run_rank(options, lambda: target(*args, **kwargs), job))


def refuse_group(process, original, *args, **kwargs):
    """Call init_process_group(), but raise NeedsRanks in the parent of all ranks."""
    if os.getpid() == process:
        raise NeedsRanks
    return original(*args, **kwargs)


def run_parent(options):
    """Run a script that starts its ranks itself, by mp.spawn; return the status."""
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    running, jobs = [], 0
    setup = {n: getattr(trace, n) for n in ("script", "max_steps", "package")}
    start_process, make_group = BaseProcess.start, dist.init_process_group

    def start(process):
        nonlocal jobs
        if starts_rank(process):
            if not any(p.is_alive() for p in running):  # the next job starts
                running.clear()
                jobs += 1
            address = "127.0.0.1", store.port, jobs
            run_target = functools.partial(run_spawned, process._target, options)
            process._target = functools.partial(run_target, setup, address)
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
    except BaseException as failure:
        error = failure
    finally:
        BaseProcess.start = start_process
        dist.init_process_group = device_mesh.init_process_group = make_group
    return end_parent(options, error, store, jobs)


def end_parent(options, error, store, jobs):
    """Print why there is no report, if there is none; return the exit status."""
    numbers = range(1, jobs + 1)
    keys = [f"job{number}/status" for number in numbers]
    statuses = [int(store.get(key)) for key in keys if store.check([key])]
    failed = any(store.check([f"job{number}/failed"]) for number in numbers)
    text = f"{options.script} ended before it made a process group"
    if isinstance(error, NeedsRanks):
        text = f"{options.script} calls init_process_group() but starts no ranks; "
        text += "put -n 2 before its name"
    elif not jobs and isinstance(error, KeyError) and error.args[0] in NUMBERS:
        text = f"{options.script} reads {error}, which a launcher sets; add -n 2"
    elif isinstance(error, ProcessExitedException) and not failed:
        text = f"no report, since {error}"
    elif isinstance(error, SystemExit):
        if statuses and error.code:
            raise error
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
    elif error and not isinstance(error, OF_SPAWN):
        print_error(error)
        statuses = statuses and [*statuses, 1]
    elif not error and not failed:
        text = f"{options.script} made no process group; put -n 2 before its name"
    if not statuses:
        print(f"Error: {text}", file=sys.stderr)
    return max(statuses, default=2)
