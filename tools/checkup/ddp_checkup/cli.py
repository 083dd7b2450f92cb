"""Run a DDP or FSDP script unchanged, and report bugs that give no error.

    ddp-checkup -n 2 SCRIPT.py [OPTIONS]      # starts two ranks by torchrun
    ddp-checkup -n 2 -m PACKAGE.MODULE [OPTIONS]
    ddp-checkup SCRIPT.py [OPTIONS]           # a script with mp.spawn
    torchrun --nproc-per-node 2 PATH/checkup SCRIPT.py [OPTIONS]

Put its own options before the script. The exit status is 1 if there is an error,
with --strict also for a warning. Else it is that of the script.
"""

import argparse
import functools
import logging
import os
import runpy
import shlex
import sys
import traceback
from contextlib import suppress
from importlib.util import find_spec
from multiprocessing.process import BaseProcess

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main as torchrun
from torch.multiprocessing import ProcessExitedException, ProcessRaisedException

from ddp_checkup import hooks, monitor
from ddp_checkup.checks import CHECKS
from ddp_checkup.hooks.collectives import note_unused, stop_job
from ddp_checkup.hooks.output import Tee
from ddp_checkup.hooks.shared import rebind, wrap
from ddp_checkup.hooks.steps import StopAfterSteps
from ddp_checkup.record import EXIT, HERE, is_library, record, state

TORCHRUN = "RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"
CHECK = {"choices": [check.name for check in CHECKS], "metavar": "CHECK"}


def parse_options():
    parser = argparse.ArgumentParser("ddp-checkup", None, __doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("-n", "--ranks", type=int, help="ranks; best 4")
    parser.add_argument("-m", "--module", action="store_true", help="run a module")
    parser.add_argument("--steps", type=int, default=0, help="steps to stop after")
    parser.add_argument("--strict", action="store_true", help="warnings fail too")
    parser.add_argument("--ignore", action="append", help="check to ignore", **CHECK)
    parser.add_argument("--json", metavar="FILE", help="file for the report as JSON")
    parser.add_argument(
        "--hang-timeout", type=float, default=60, help="seconds a rank may wait (60)"
    )
    parser.add_argument("--all", action="store_true", help="list all checks")
    parser.add_argument("--reference", help="script for one GPU with these losses")
    parser.add_argument("--tolerance", type=float, default=0.05, help="of losses")
    parser.add_argument("--explain", help="explain a check, and exit", **CHECK)
    parser.add_argument("script", nargs="?", help="DDP script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="its options")
    options = parser.parse_args()
    if options.explain:
        check = next(check for check in CHECKS if check.name == options.explain)
        print(f"{check.name} ({check.level}): {check.promise}")
        print(f"Seen by: {check.seen}.\nFix: {check.fix}")
        sys.exit()
    if not options.script:
        parser.error("name a script, or -m MODULE")
    if not find_script(options):
        parser.error(f"no script {options.script}; give a file's path, or -m MODULE")
    check_options(options, parser)
    return options


def check_options(options, parser):
    """End with one line if an option cannot be used, before the script runs."""
    if options.ranks is not None and options.ranks < 1:
        parser.error(f"-n {options.ranks}: use 2 or more")
    try:
        shlex.split(options.reference or "")
        if options.json:
            open(options.json, "a").close()
    except ValueError as error:
        parser.error(f"--reference: {error}")
    except OSError as error:
        parser.error(f"--json: {error}")
    known = [name for name in TORCHRUN if name in os.environ]
    if not options.ranks and 0 < len(known) < len(TORCHRUN):
        line = f"{known[0]} is set, but not all that torchrun sets: add -n 2, or run"
        parser.error(f"{line} `unset {' '.join(known)}`")


def is_rank():
    """Return whether torchrun, or something like it, started this process."""
    return all(name in os.environ for name in TORCHRUN)


def main():
    options = parse_options()
    os.environ["DDP_CHECKUP"] = "1"  # a watched run is no measurement of speed
    if options.ranks and not is_rank():
        start_ranks(options)
    hooks.reset()
    state.script, state.max_steps = find_script(options), options.steps
    sys.path[0] = os.getcwd() if options.module else os.path.dirname(state.script)
    if options.module:  # it may be installed, and is the user's all the same
        package = find_spec(options.script.partition(".")[0])
        folders = package.submodule_search_locations  # None: a module, no package
        folder = next(iter(folders)) if folders else os.path.dirname(package.origin)
        state.main_prefix = (os.path.abspath(folder),)
    sys.argv = [options.script, *options.arguments]
    sys.path.append(os.path.dirname(HERE))  # for processes that the script spawns
    if not is_rank():
        sys.exit(run_parent(options))
    state.rank, state.world = (int(os.environ[n]) for n in ("RANK", "WORLD_SIZE"))
    monitor.start(options)
    sys.exit(run_rank(options, lambda: run_script(options)))


def find_script(options):
    """Return the file of the script or module, if there is one."""
    if not options.module:
        return os.path.isfile(options.script) and os.path.abspath(options.script)
    sys.path[0] = os.getcwd()
    with suppress(ImportError):  # of its package
        spec = find_spec(options.script)
        return spec and spec.origin


def start_ranks(options):
    """Start this command by torchrun, as so many ranks; exit with its status."""
    # They meet here, also where nobody can resolve this machine's name.
    command = ["--standalone", "--local-addr=127.0.0.1"]
    command += [f"--nproc-per-node={options.ranks}"]
    folder = os.path.dirname(HERE)
    installed = not os.path.exists(f"{folder}/__main__.py")
    command += ["-m", "ddp_checkup"] if installed else [folder]
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    logging.disable(logging.ERROR)  # the ranks have said it all
    try:
        torchrun([*command, *sys.argv[1:]])
    except ChildFailedError as error:
        status = max(failure.exitcode for failure in error.failures.values())
        if status < 0:
            print(f"Error: no report, a rank ended by signal {-status}")
        sys.exit(status if status > 0 else 128 - status)
    sys.exit()


def run_script(options):
    if options.module:
        runpy.run_module(options.script, run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(state.script, run_name="__main__")


def run_rank(options, function):
    """Run a script or a spawned function under the hooks; return its status."""
    hooks.install()
    wrap(dist, "init_process_group", after=lambda *_: start_spawned(options))
    rebind()
    stdout, stderr = state.stdout, _ = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = Tee(stdout), Tee(stderr)
    os._exit = functools.partial(leave, os.getpid())
    end = "done"
    try:
        function()
    except StopAfterSteps:
        end = "stopped"
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
    if state.store is None:  # no process group was made
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
    error = error.with_traceback(frames or error.__traceback__)
    sys.__stderr__.write("".join(traceback.format_exception(error)))


def fail_rank(error):
    """Report what was seen before an error of the script."""
    note_unused(str(error))
    if not state.store:
        return
    state.end = "failed" if state.steps or record.unused else "unseen"
    if state.end == "failed":
        stop_job("failed", f"Rank {state.rank} failed")
    state.thread.join()  # in a store's call it would abort Python's exit


def start_spawned(options):
    """Start to monitor a spawned rank: it has learnt its number."""
    if state.store is None and state.address:
        state.rank, state.world = dist.get_rank(), dist.get_world_size()
        monitor.start(options, *state.address)


def run_spawned(target, options, setup, *args, **kwargs):
    """Run the target of a process that a script starts, under the hooks."""
    hooks.reset()
    vars(state).update(setup)
    sys.exit(run_rank(options, lambda: target(*args, **kwargs)))


def run_parent(options):
    """Run a script that starts its ranks itself, by mp.spawn; return the status."""
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    running, jobs = [], 0
    setup = {n: getattr(state, n) for n in ("script", "max_steps", "main_prefix")}
    original = BaseProcess.start

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
        return original(process)

    BaseProcess.start = start
    error = None
    try:
        run_script(options)
    except (ProcessExitedException, ProcessRaisedException) as failure:
        error = failure
    except KeyError as failure:
        if failure.args[0] not in TORCHRUN:
            raise
        error = f"{options.script} reads {failure}, which torchrun sets; add -n 2"
    finally:
        BaseProcess.start = original
    keys = [f"checkup{job}/status" for job in range(1, jobs + 1)]
    statuses = [int(store.get(key)) for key in keys if store.check([key])]
    if not statuses:
        text = f"{options.script} made no process group; start it with -n 2"
        print(f"Error: {str(error or text).strip()}", file=sys.stderr)
    return max(statuses, default=2)
