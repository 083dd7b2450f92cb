"""Run a DDP or FSDP script unchanged, and report bugs that give no error.

    ddp-checkup -n 2 SCRIPT.py [OPTIONS]      # starts two ranks by torchrun
    ddp-checkup -n 2 -m PACKAGE.MODULE [OPTIONS]
    ddp-checkup SCRIPT.py [OPTIONS]           # a script with mp.spawn
    python PATH/checkup -n 2 SCRIPT.py [OPTIONS]  # not installed
    torchrun --nproc-per-node 2 PATH/checkup SCRIPT.py [OPTIONS]

Put its own options before the script. The exit status is 1 if there is an error,
with --strict also for a warning. Else it is that of the script.
"""

import argparse
import logging
import os
import shlex
import sys
import traceback
import warnings
from contextlib import suppress
from importlib.util import find_spec

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main as torchrun

from ddp_checkup import __version__
from ddp_checkup.checks import CHECKS
from ddp_checkup.record import HERE, INTERRUPTED, state

CHECK = {"choices": [check.name for check in CHECKS], "metavar": "CHECK"}
OF_A_RANK = "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"


def parse_options():
    """Return the options; end with one line if they cannot be used."""
    usage = "ddp-checkup [-n RANKS] [OPTIONS] SCRIPT.py [ITS OPTIONS]"
    parser = argparse.ArgumentParser("ddp-checkup", usage, __doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    version = f"ddp-checkup {__version__}"
    parser.add_argument("--version", action="version", version=version)
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
    check_source(parser, find_script(options))
    options.is_rank = is_rank(parser, options)
    return options


def check_options(options, parser):
    """End with one line if an option cannot be used, before the script runs."""
    if options.ranks is not None and options.ranks < 2:
        parser.error(f"-n {options.ranks}: use 2 or more")
    try:
        options.reference = shlex.split(options.reference or "")
    except ValueError as error:
        parser.error(f"--reference: {error}")
    if options.reference and not os.path.isfile(options.reference[0]):
        parser.error(f"--reference: no script {options.reference[0]}")
    options.folder = os.getcwd()  # the script may go to another one
    if options.json and os.environ.get("RANK", "0") == "0":  # rank 0 writes it
        try:
            open(options.json, "w").close()  # no report of an earlier run stays
        except OSError as error:
            parser.error(f"--json: {error}")


def check_source(parser, path):
    """End if this is no Python, before several ranks say it."""
    with open(path, "rb") as file:
        source = file.read()
    if b"\0" in source:
        parser.error(f"{path} is no Python script")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            compile(source, path, "exec", dont_inherit=True)
    except SyntaxError as error:
        if os.environ.get("RANK", "0") == "0":
            sys.stderr.write("".join(traceback.format_exception_only(error)))
        sys.exit(1)


def is_rank(parser, options):
    """Return whether a launcher has started this process as one of several ranks."""
    if options.ranks and "TORCHELASTIC_RUN_ID" not in os.environ:
        for name in OF_A_RANK:  # left over from an earlier launcher in this shell
            os.environ.pop(name, None)
    if "RANK" not in os.environ:
        return False
    for name in OF_A_RANK:
        if not os.environ.get(name):
            text = f"RANK is set, but {name} is not"
            parser.error(f"{text}: add -n 2, or run `unset RANK`")
        if name != "MASTER_ADDR" and not os.environ[name].isdigit():
            parser.error(f"{name} is no number; run `unset {name}`")
    if os.environ["WORLD_SIZE"] in ("0", "1"):
        text = "WORLD_SIZE is 1, and the checkup needs two ranks: use -n 2 without "
        parser.error(text + "torchrun, or GPUS=2 in front of a run script's command")
    return True


def main():
    options = parse_options()
    os.environ["DDP_CHECKUP"] = "1"  # a watched run is no measurement of speed
    if options.ranks and not options.is_rank:
        start_ranks(options)
    # They import torch.distributed.fsdp, for which the launcher would wait a second.
    from ddp_checkup import hooks
    from ddp_checkup.processes import run_launched, run_parent

    hooks.reset()
    state.script, state.max_steps = find_script(options), options.steps
    sys.path[0] = os.getcwd() if options.module else os.path.dirname(state.script)
    if options.module:  # it may be installed, and is the user's all the same
        package = find_spec(options.script.partition(".")[0])
        folders = package.submodule_search_locations
        file = os.path.abspath(package.origin or "")
        state.main_prefix = tuple(folders or [os.path.dirname(file)])
    sys.argv = [options.script, *options.arguments]
    sys.path.append(os.path.dirname(HERE))  # for processes that the script spawns
    run = run_launched if options.is_rank else run_parent
    sys.exit(run(options))


def find_script(options):
    """Return the file of the script or module, if there is one."""
    if not options.module:
        return os.path.isfile(options.script) and os.path.abspath(options.script)
    sys.path[0] = os.getcwd()
    name = options.script
    with suppress(ImportError, ValueError):  # of its package
        spec = find_spec(name)
        if spec and spec.submodule_search_locations:  # python -m PACKAGE
            spec = find_spec(f"{name}.__main__")
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
    except (KeyboardInterrupt, SignalException):
        print("Stopped.", file=sys.stderr)
        sys.exit(INTERRUPTED)
    except ChildFailedError as error:
        status = max(failure.exitcode for failure in error.failures.values())
        if status < 0:
            print(f"Error: no report, a rank ended by signal {-status}")
        sys.exit(status if status > 0 else 128 - status)
    sys.exit()
