"""Run a DDP or FSDP script unchanged, and report bugs that give no error.

    ddp-checkup -n 2 SCRIPT.py [ITS OPTIONS]            # starts two ranks
    ddp-checkup -n 2 -m PACKAGE.MODULE [ITS OPTIONS]
    ddp-checkup SCRIPT.py [ITS OPTIONS]                 # a script with mp.spawn
    python PATH/checkup -n 2 SCRIPT.py [ITS OPTIONS]    # not installed
    torchrun --nproc-per-node 2 -m ddp_checkup SCRIPT.py [ITS OPTIONS]
    srun python -m ddp_checkup SCRIPT.py [ITS OPTIONS]  # also by mpirun

Put the checkup's options before the script. The exit status is 1 if there is an
error, with --strict also for a warning. Else it is the script's status.
"""

import argparse
import inspect
import os
import shlex
import sys
import traceback
import warnings
from contextlib import suppress
from importlib.util import find_spec

from ddp_checkup import __version__, launch


def make_parser():
    usage = "ddp-checkup [-n RANKS] [OPTIONS] SCRIPT.py [ITS OPTIONS]"
    parser = argparse.ArgumentParser("ddp-checkup", usage, __doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    version = f"ddp-checkup {__version__}"
    parser.add_argument("--version", action="version", version=version)
    parser.add_argument(
        "-n", "--ranks", type=int, help="number of ranks; 4 show more than 2"
    )
    parser.add_argument(
        "-m", "--module", action="store_true", help="a module instead of a script"
    )
    parser.add_argument(
        "--steps", type=int, default=0, help="optimizer steps to stop after"
    )
    parser.add_argument(
        "--strict", action="store_true", help="exit status 1 for warnings, too"
    )
    parser.add_argument(
        "--ignore", action="append", metavar="CHECK", help="check not to count"
    )
    parser.add_argument("--json", metavar="FILE", help="file for the report as JSON")
    parser.add_argument(
        "--hang-timeout", type=float, default=60, help="seconds a rank may wait (60)"
    )
    parser.add_argument(
        "--all",
        action="store_true",
        help="list of the other checks, too: ok, or not seen",
    )
    parser.add_argument(
        "--reference",
        metavar="COMMAND",
        help="script for one GPU that prints the same losses",
    )
    parser.add_argument(
        "--tolerance", type=float, default=0.05, help="relative, of losses (0.05)"
    )
    parser.add_argument("--explain", metavar="CHECK", help="check to explain")
    parser.add_argument("script", nargs="?", help="DDP script, or module")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="its options")
    return parser


def parse_options():
    """Return the options; exit with a one-line error if they cannot be used."""
    parser = make_parser()
    options = parser.parse_args()
    if options.explain or options.ignore:
        check_names([options.explain, *(options.ignore or [])], parser)
    if options.explain:
        explain(options.explain)
        sys.exit()
    if not options.script:
        parser.error("name a script, or -m MODULE")
    options.path = find_script(options)
    if not options.path:
        parser.error(f"no script {options.script}; give a file's path, or -m MODULE")
    if options.ranks is not None and options.ranks < 2:
        parser.error(f"-n {options.ranks}: use 2 or more")
    options.starts_ranks = options.ranks and not launch.is_launched()
    try:
        options.place = None if options.starts_ranks else launch.find_place()
    except ValueError as error:
        parser.error(str(error))
    check_reference(options, parser)
    check_files(options, parser)
    check_source(options)
    return options


def check_names(names, parser):
    """Exit with a one-line error if there is no check of such a name."""
    from ddp_checkup.checks import CHECKS  # imports PyTorch

    known = [check.name for check in CHECKS]
    for name in names:
        if name and name not in known:
            parser.error(f"no check {name}; there are {', '.join(known)}")


def explain(name):
    from ddp_checkup.checks import CHECKS

    check = next(check for check in CHECKS if check.name == name)
    print(f"{check.name} ({check.level}): {check.promise}")
    print(f"Seen by: {inspect.getdoc(check.function)}\nFix: {check.fix}")


def check_reference(options, parser):
    try:
        options.reference = shlex.split(options.reference or "")
    except ValueError as error:
        parser.error(f"--reference: {error}")
    if options.reference and not os.path.isfile(options.reference[0]):
        parser.error(f"--reference: no script {options.reference[0]}")


def check_files(options, parser):
    options.folder = os.getcwd()  # the script may change it
    options.is_first = options.place is None or options.place.rank == 0
    if options.json and options.is_first:
        try:
            open(options.json, "w").close()  # no report of an earlier run stays
        except OSError as error:
            parser.error(f"--json: {error}")


def check_source(options):
    """Exit with the error of a script that is no Python, before all ranks fail."""
    with open(options.path, "rb") as file:
        source = file.read()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            compile(source, options.path, "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:  # null bytes raise a ValueError
        if options.is_first:
            sys.stderr.write("".join(traceback.format_exception_only(error)))
        sys.exit(1)


def find_script(options):
    """Return the path of the script or module, or None."""
    name = options.script
    if not options.module:
        return os.path.abspath(name) if os.path.isfile(name) else None
    sys.path[0] = os.getcwd()
    with suppress(ImportError, ValueError):  # its package may fail to import
        spec = find_spec(name)
        if spec and spec.submodule_search_locations:  # python -m PACKAGE
            spec = find_spec(f"{name}.__main__")
        return spec and spec.origin


def main():
    options = parse_options()
    os.environ["DDP_CHECKUP"] = "1"  # tells scripts that they run slower
    if options.starts_ranks:
        sys.exit(launch.start_ranks(options.ranks))
    from ddp_checkup import run  # imports PyTorch, which the launcher does without

    sys.exit(run.run(options))
