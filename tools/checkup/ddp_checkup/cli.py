"""Run a DDP or FSDP script unchanged, and report bugs that give no error.

    ddp-checkup -n 2 SCRIPT.py [OPTIONS]      # starts two ranks by torchrun
    ddp-checkup -n 2 -m PACKAGE.MODULE [OPTIONS]
    ddp-checkup SCRIPT.py [OPTIONS]           # a script with mp.spawn
    torchrun --nproc-per-node 2 PATH/checkup SCRIPT.py [OPTIONS]

Put its own options before the script. The exit status is 1 if there is an error,
with --strict also for a warning. Else it is that of the script.
"""

import argparse
import logging
import os
import re
import runpy
import sys
from importlib.util import find_spec
from multiprocessing.process import BaseProcess

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main as torchrun

from ddp_checkup import hooks, monitor
from ddp_checkup.checks import CHECKS
from ddp_checkup.record import HERE, record, reset, state

NAMES = [check.name for check in CHECKS]


def parse_options():
    parser = argparse.ArgumentParser(
        prog="ddp-checkup",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "-n", "--ranks", type=int, metavar="N", help="ranks to start on this machine"
    )
    add(
        "-m",
        "--module",
        action="store_true",
        help="SCRIPT is a module, as in python -m",
    )
    add(
        "--steps",
        type=int,
        default=0,
        metavar="N",
        help="optimizer steps to stop after (default: all)",
    )
    add(
        "--strict",
        action="store_true",
        help="exit with status 1 for warnings as well",
    )
    add(
        "--ignore",
        action="append",
        default=[],
        choices=NAMES,
        metavar="CHECK",
        help="check to ignore",
    )
    add("--json", metavar="FILE", help="file for the report as JSON")
    add(
        "--hang-timeout",
        type=float,
        default=60,
        metavar="SECONDS",
        help="seconds after which ranks that all wait are a hang (default: 60)",
    )
    add(
        "--reference",
        metavar="COMMAND",
        help="script for one GPU that has to print the same losses",
    )
    add(
        "--tolerance",
        type=float,
        default=0.05,
        help="difference of the losses, relative to the first",
    )
    add(
        "--explain", choices=NAMES, metavar="CHECK", help="explain a check, and exit"
    )
    add("script", nargs="?", help="DDP script")
    add("arguments", nargs=argparse.REMAINDER, help="its options")
    options = parser.parse_args()
    if options.explain:
        explain(options.explain)
        sys.exit()
    if not options.script:
        parser.error("no script; --help shows how to start one")
    return options


def explain(name):
    """Print what a check promises, how it is seen, and how to fix it."""
    check = CHECKS[NAMES.index(name)]
    print(f"{check.name} ({check.level}): {check.promise}\nSeen by: {check.seen}.")
    for framework, fix in check.fixes.items():
        print(f"Fix{' in ' + framework if framework else ''}: {fix}")


def main():
    options = parse_options()
    if find_script(options) is None:
        fail(f"no script {options.script}; give the path of a file, or -m MODULE")
    if options.ranks and "RANK" not in os.environ:
        start_ranks(options)
    reset()
    state.script, state.max_steps = find_script(options), options.steps
    if options.module:  # it may be installed, and is the user's all the same
        package = options.script.partition(".")[0]
        state.main_prefix = (
            os.path.dirname(os.path.abspath(find_spec(package).origin)),
        )
    sys.argv = [options.script, *options.arguments]
    sys.path.append(os.path.dirname(HERE))  # for processes that the script spawns
    sys.path[0] = os.getcwd() if options.module else os.path.dirname(state.script)
    if "RANK" in os.environ:
        state.rank, state.world = (
            int(os.environ["RANK"]),
            int(os.environ["WORLD_SIZE"]),
        )
        monitor.start(options)
        status = run_rank(options, lambda: run_script(options))
    else:
        status = run_parent(options)
    sys.exit(status)


def fail(text):
    print(f"Error: {text}", file=sys.stderr)
    sys.exit(2)


def find_script(options):
    """Return the file of the script or module, or None if there is none."""
    if not options.module:
        return (
            os.path.abspath(options.script)
            if os.path.isfile(options.script)
            else None
        )
    sys.path.insert(0, os.getcwd())
    try:
        spec = find_spec(options.script)
    except ImportError:
        spec = None
    finally:
        del sys.path[0]
    return spec and spec.origin


def start_ranks(options):
    """Start this command by torchrun, as so many ranks; exit with its status."""
    command = ["--standalone", f"--nproc-per-node={options.ranks}"]
    folder = os.path.dirname(HERE)
    installed = not os.path.exists(f"{folder}/__main__.py")
    command += ["-m", "ddp_checkup"] if installed else [folder]
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    logging.disable(logging.ERROR)  # the ranks have said it all
    try:
        torchrun([*command, *sys.argv[1:]])
    except ChildFailedError as error:
        status = max(failure.exitcode for failure in error.failures.values())
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
    dist_init(options)
    hooks.rebind()
    stdout, stderr = state.stdout, _ = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = hooks.Tee(stdout), hooks.Tee(stderr)
    try:
        function()
        end = "done"
    except hooks.StopAfterSteps:
        end = "stopped"
    except BaseException as error:
        if not isinstance(error, SystemExit) or error.code:
            fail_rank(options, error)
            raise
        end = "done"
    sys.stdout, sys.stderr = stdout, stderr
    stdout.flush()
    if state.store is None:  # no process group was made
        return 0
    state.end = end
    state.thread.join()
    if end == "stopped":  # the group is open, and would complain
        os._exit(state.status)
    return state.status


def fail_rank(options, error):
    """Report what was seen before an error of the script."""
    no_gpu = (
        re.search("CUDA|NVIDIA|NCCL", str(error)) and not torch.cuda.is_available()
    )
    if no_gpu:
        line = str(error).splitlines()[0]
        print(
            f"Error: {options.script} needs a GPU, and none is here ({line})",
            file=sys.__stderr__,
        )
        os._exit(2)
    hooks.note_unused(str(error))
    if not state.store:
        return
    if state.steps or record.unused:
        hooks.stop_job("failed", f"Rank {state.rank} failed")
        state.end = "failed"
    else:  # nothing to report; a thread in a store's call would abort Python's exit
        state.end = "unseen"
    state.thread.join()


def dist_init(options):
    """Note that a process group is made; a spawned rank learns its number then."""

    def after(result, values):
        if state.store is None and state.address:
            state.rank, state.world = dist.get_rank(), dist.get_world_size()
            monitor.start(options, *state.address)

    if not hasattr(state, "address"):
        state.address = None
    hooks.wrap(
        dist,
        "init_process_group",
        before=lambda *_: setattr(record, "closed", False),
        after=after,
    )


# Scripts that start their ranks themselves, by mp.spawn or multiprocessing.
class SpawnedRank:
    """The target of a process that a script starts: runs it under the hooks."""

    def __init__(self, target, options, setup):
        self.target, self.options, self.setup = target, options, setup

    def __call__(self, *args, **kwargs):
        reset()
        vars(state).update(self.setup)
        sys.exit(run_rank(self.options, lambda: self.target(*args, **kwargs)))


def run_parent(options):
    """Run a script that starts its ranks itself; return the exit status."""
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    running, setup = [], {"script": state.script}
    setup |= {"max_steps": options.steps}
    setup |= {"main_prefix": state.main_prefix}
    jobs = 0
    original = BaseProcess.start

    def start(process):
        nonlocal jobs
        target = process._target
        name = getattr(target, "__module__", "")
        if target and not name.startswith(("torch.utils.data", "multiprocessing")):
            if not any(p.is_alive() for p in running):  # the next job of this script
                running.clear()
                jobs += 1
            address = ("127.0.0.1", store.port), jobs
            process._target = SpawnedRank(
                target, options, setup | {"address": address}
            )
            running.append(process)
        return original(process)

    BaseProcess.start = start
    try:
        run_script(options)
    finally:
        BaseProcess.start = original
    statuses = []
    for job in range(1, jobs + 1):
        key = f"checkup{job}/status"
        statuses += [int(store.get(key))] if store.check([key]) else []
    if not statuses:
        fail(
            f"{options.script} made no process group; start it with -n 2 or torchrun"
        )
    return max(statuses)
