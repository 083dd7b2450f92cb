"""Reads what compare.py compares: runs, of one person or of a class.

Anybody's file may hold anything: a line is a run, or it is named and left out.
"""

import json
import math
import os
import re
import sys
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
    """
    left_out, runs = [] if left_out is None else left_out, {}
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
            except NO_RUN:
                broken.append(number)
        for number in broken if found else []:
            say(f"line {number} of {file} is no whole run: left out", left_out)
        if not found:
            say(f"no run in {file}: left out", left_out)
        for line, run in found:
            if line in runs:
                names = dict.fromkeys(filter(None, (runs[line]["who"], who)))
                of = f" ({' and '.join(names)})" if names else ""
                note = f"a run is there twice{of}, and counts once"
                runs[line]["notes"].append(note)
            elif not since or run["end"] >= since:
                runs[line] = run
    if not runs:
        when = f" since {since}" if since else ""
        names = ", ".join(map(str, files))
        raise UserError(f"no results in {names}{when}: run a script first")
    return [*runs.values()]


def find_people(files, runs):
    """Return a row of cells for each file: whose, how many runs, where, the last."""
    rows = []
    for file, who in zip(files, tell_apart(files), strict=True):
        own = [run for run in runs if run["who"] == who]
        machines = "; ".join(dict.fromkeys(run["machine"] for run in own))
        last = str(max(run["end"] for run in own)) if own else ""
        rows.append([who or "runs", printable(file), str(len(own)), machines, last])
    return rows


def prepare(run, who=""):
    """Return a run with its speed, end, machine, and in words what is odd about it.

    who: whose it is, if there are several. A figure that an older version lacks is
    nan. Raises one of NO_RUN if that is no run.
    """
    lacking = "seconds_per_epoch", "training_seconds", "accuracy", "peak_memory_gb"
    texts = "script", "device", "counts", "torch", "cpu"
    run = {"counts": "images", "nodes": 1, "torch": "", "cpu": "", "cpus": "?"} | run
    run |= {name: float(run.get(name, math.nan)) for name in lacking}
    run |= {name: printable(run[name]) for name in texts}
    run["speed"] = float(run[f"{run['counts']}_per_second"])
    run["size"] = run[f"{run['counts']}_per_epoch"]
    run["end"] = datetime.fromisoformat(run["finished"][:19])  # as clocks showed it
    whole = [run[name] for name in ("gpus", "nodes", "batch", "batch_per_gpu")]
    if not (
        all(isinstance(number, int) and 0 < number < 2**31 for number in whole)
        and 0 < run["speed"] < math.inf
        and 0 < run["size"] < math.inf
    ):
        raise ValueError("not what RunLog writes")
    options = {printable(name): value for name, value in run["options"].items()}
    for name, value in options.items():
        options[name] = printable(value) if isinstance(value, str) else value
    asked, notes = options["epochs"], []
    made = len(run.get("epoch_ends", range(asked)))
    if made < asked:
        notes.append(f"only {made} of {asked} epochs: stopped, or resumed")
    if share := re.search(r" \((\d+) share (\d+)\)", run["device"]):
        notes.append(f"{share[1]} processes shared {share[2]} CPU cores")
    # Where no CPU is named, by an older version, it may be any machine of theirs.
    cpu = f"CPU not named{f' ({who})' if who else ''}"
    cpu = f"{run['cpus']} x {run['cpu']}" if run["cpu"] else cpu
    run["where"] = run["device"].replace(share[0] if share else "", "")
    run["machine"] = printable(f"{run['where']}, {cpu}")
    return run | {"options": options, "who": who, "notes": notes, "epochs": made}
