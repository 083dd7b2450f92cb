"""Reads what compare.py compares: runs, of one person or of a class.

Anybody's file may hold anything: a line is a run, or it is named and left out.
"""

import json
import math
import os
import re
import sys
from collections import defaultdict
from datetime import datetime
from pathlib import Path

from common.cli import UserError

# What prepare() may raise of a line that RunLog did not write.
NO_RUN = ValueError, TypeError, LookupError, AttributeError
NO_RUN += ArithmeticError, RecursionError


def printable(text):
    """Return a text without what a terminal would obey."""
    if not isinstance(text, str):
        raise TypeError("not what RunLog writes")
    return "".join(c if c.isprintable() else "?" for c in text)


def say(text, left_out):
    """Warn of what is left out, and add it to this list."""
    left_out.append(printable(text))
    print(f"Warning: {left_out[-1]}", file=sys.stderr)


def find_files(names):
    """Return the files that these files and folders are, each once."""
    files = {}
    for name in map(Path, names):
        found = sorted(name.rglob("*.jsonl")) or [name / "results.jsonl"]
        for file in found if name.is_dir() else [name]:
            files.setdefault(file.resolve(), str(file))
    return [*files.values()]


def tell_apart(files):
    """Return for each file what tells it from the others, the shortest that does."""
    if len(files) == 1:
        return [""]
    paths = [Path(os.path.abspath(file)) for file in files]
    start = len(Path(os.path.commonpath(paths)).parts)
    names = [[*path.parts[start:-1], path.stem] for path in paths]
    while len({name[-1] for name in names}) == 1 < min(map(len, names)):
        names = [name[:-1] for name in names]
    # A folder, or the file or its own folder, or all that is not the same.
    for part in slice(1), slice(-1, None), slice(None):
        found = [printable("/".join(name[part])) for name in names]
        if len({*found}) == len(files):
            return found
    return [printable(str(file)) for file in files]


def read_runs(files, since=None, left_out=None):
    """Return the runs in these .jsonl files, a dict each, or raise UserError.

    since: a datetime; runs that ended before it are left out. What is no run, and a
    file that cannot be read, is named and left out, and added to the list left_out.
    A line that is there several times is one run; its "copies": {who has it: run}.
    """
    left_out, same = [] if left_out is None else left_out, defaultdict(list)
    for file, who in zip(files, tell_apart(files), strict=True):
        try:
            lines = Path(file).read_text("utf-8-sig", errors="replace").splitlines()
        except OSError as error:
            text = f"cannot read {file}: {error.strerror}"
            if len(files) == 1:
                raise UserError(text) from None
            say(text, left_out)
            continue
        found, broken = [], []
        for number, line in enumerate(lines, start=1):
            try:
                found.append((line.strip(), prepare(json.loads(line), who)))
            except NO_RUN as error:
                why = {KeyError: f"no {error}", json.JSONDecodeError: "no JSON"}
                broken.append((number, why.get(type(error), "a value is odd")))
        if not found:
            say(f"no run in {file}: left out", left_out)
            continue
        for number, why in broken[:5]:
            say(f"line {number} of {file} is no run ({why}): left out", left_out)
        if more := len(broken[5:]):
            say(f"and {more:,} more of {file}", left_out)
        name_cpus([run for _, run in found])
        for line, run in found:
            if not since or run["end"] >= since:
                same[line].append(run)
    runs = []
    for copies in same.values():
        runs.append(copies[0] | {"copies": {copy["who"]: copy for copy in copies}})
        if len(copies) > 1:
            people = runs[-1]["copies"]
            of = f" ({', '.join(people)})" if len(people) > 1 else ""
            runs[-1]["notes"].append(f"there {len(copies)} times{of}, counts once")
    if not runs:
        when = f" since {since}" if since else ""
        names = ", ".join(map(str, files))
        raise UserError(f"no results in {names}{when}: run a script first")
    return runs


def name_cpus(runs):
    """Name the CPU of runs of an older version, if their file names only one."""
    named = {run["machine"]: run for run in runs if run["cpu"]}.values()
    for run in [run for run in runs if run["nameless"]]:
        here = [other for other in named if other["where"] == run["where"]]
        if len(here) == 1:
            run |= {name: here[0][name] for name in ("cpu", "machine", "nameless")}


def whole(number):
    return type(number) is int and 0 < number < 2**31


def prepare(run, who=""):
    """Return a run with its speed, end, machine, and in words what is odd about it.

    who: whose it is, if there are several. A figure that an older version lacks is
    nan. Raises one of NO_RUN if that is no run.
    """
    lacking = "seconds_per_epoch", "training_seconds", "accuracy", "peak_memory_gb"
    texts = "script", "device", "counts", "version", "cpu"
    numbers = "gpus", "nodes", "batch", "batch_per_gpu"
    run = {name: value for name, value in run.items() if value is not None}
    run = {"counts": "images", "nodes": 1, "cpu": "", "cpus": "?"} | run
    run["framework"] = "tensorflow" if "tensorflow" in run else "torch"
    run["version"] = run.get(run["framework"], "")
    run |= {name: float(run.get(name, math.nan)) for name in lacking}
    run |= {name: printable(run[name]) for name in texts}
    run["speed"] = float(run[f"{run['counts']}_per_second"])
    run["size"] = run[f"{run['counts']}_per_epoch"]
    run["end"] = datetime.fromisoformat(run["finished"][:19])  # as clocks showed it
    real = 0 < run["speed"] < math.inf and 0 < run["size"] < math.inf
    if not (real and all(whole(run[name]) for name in numbers)):
        raise ValueError("not what RunLog writes")
    options = {printable(name): value for name, value in run["options"].items()}
    for name, value in options.items():
        options[name] = printable(value) if isinstance(value, str) else value
    asked, ends, notes = options.get("epochs"), run.get("epoch_ends"), []
    made = len(ends) if isinstance(ends, list) else asked
    if not whole(asked):
        made = "?"
        notes.append("its number of epochs is not known")
    elif made < asked:
        notes.append(f"only {made} of {asked} epochs: stopped, or resumed")
    if share := re.search(r" \((\d+) share (\d+)\)", run["device"]):
        notes.append(f"{share[1]} processes shared {share[2]} CPU cores")
    run["where"] = run["device"].replace(share[0] if share else "", "")
    # With a GPU that is the machine. A CPU that is not named may be any of theirs.
    on_cpu = run["where"].startswith("CPU core")
    run["nameless"] = on_cpu and not run["cpu"]
    nameless = f"CPU not named{f' ({who})' if who else ''}"
    cpu = f"{run['cpus']} x {run['cpu']}" if run["cpu"] else nameless
    run["machine"] = run["where"] + printable(f", {cpu}") * on_cpu
    return run | {"options": options, "who": who, "notes": notes, "epochs": made}
