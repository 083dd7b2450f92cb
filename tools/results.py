"""Runs in results.jsonl files, from one person or from a class.

A file may hold anything: lines that are not runs are reported and left out.
"""

import json
import os
import sys
from datetime import datetime
from itertools import pairwise
from pathlib import Path

from common.errors import UserError

# What parse_run() may raise for a line that RunLog did not write.
NOT_A_RUN = ValueError, TypeError, LookupError, ArithmeticError, RecursionError
# The slowest epoch by the fastest: more means that the machine was busy.
MAX_VARIATION = 1.5
COUNTS = "gpus", "nodes", "batch", "batch_per_gpu", "size", "epochs"
NUMBERS = "seconds_per_epoch", "training_seconds", "accuracy", "peak_memory_gb"


def printable(text):
    """Return a text without control characters, which a terminal would obey."""
    return "".join(c if c.isprintable() else "?" for c in text)


def warn(text):
    print(f"Warning: {printable(text)}", file=sys.stderr)


def find_files(names):
    """Return the .jsonl files in these files and folders, each file once."""
    files = {}
    for path in map(Path, names):
        found = sorted(path.rglob("*.jsonl")) if path.is_dir() else [path]
        if not found:
            warn(f"no .jsonl file in {path}")
        for file in found:
            files.setdefault(file.resolve(), file)
    return list(files.values())


def name_owner(file, files):
    """Return who handed in a file: its path below the common folder of all files."""
    if len(files) == 1:
        return ""
    folder = os.path.commonpath([os.path.abspath(os.path.dirname(f)) for f in files])
    name = os.path.relpath(file, folder).removesuffix(".jsonl")
    return name.removesuffix("/results").removesuffix("/logs")


def read_runs(files):
    """Return the runs in these .jsonl files, a dict each, or raise UserError.

    Lines that are not runs are left out, and so are runs with --verbose, which print
    in each step. A line that is in several files is one run with several owners.
    """
    runs = {}  # {line: run}
    for file in files:
        try:
            text = Path(file).read_text("utf-8-sig", errors="replace")
        except OSError as error:
            text = f"cannot read {file}: {error.strerror}"
            raise UserError(f"{text}; run a script first") from None
        owner, broken = name_owner(file, files), []
        if not text.strip():
            warn(f"{file} is empty")
            continue
        # splitlines() would also split at U+2028.
        lines = text.rstrip("\n").split("\n")
        for number, line in enumerate(lines, start=1):
            try:
                run = parse_run(json.loads(line), owner)
            except NOT_A_RUN as error:
                broken.append(f"line {number}, {type(error).__name__}: {error}")
                continue
            if first := runs.get(line):
                note = f"one line in the files of {first['owner']} and {owner}"
                if owner in first["owners"]:
                    note = "the same line twice in a file"
                first["notes"].append(f"{note}: counted once")
                first["owners"].add(owner)
            runs.setdefault(line, run)
        if broken:
            warn(f"{file}: left out {len(broken)} lines, first {broken[0]}")
    kept = [run for run in runs.values() if not run["options"].get("verbose")]
    if len(kept) < len(runs):
        count = len(runs) - len(kept)
        warn(f"left out {count} runs with --verbose, which prints in each step")
    if not kept:
        names = ", ".join(map(str, files))
        raise UserError(f"no results in {names}; run a script first")
    return kept


def parse_run(fields, owner=""):
    """Return a run: the fields that RunLog wrote, and what compare.py needs besides.

    script, name: its stem, without and with the folder in which it was started
    batch_per_gpu, batch: of one GPU, and of all
    speed, size: images (or tokens) per second, and per epoch
    machine: runs are compared only within a machine; processor: a GPU's name, or
    "CPU core"
    end: the time when it ended
    epochs: epochs that ran, without fine-tuning
    owner, owners: whose file has the run first, and all whose files have it
    notes: what is unusual about the run, in words

    Raises one of NOT_A_RUN if RunLog did not write these fields.
    """
    run, options = {**fields}, fields["options"]
    run["size"] = run["per_epoch"]
    run["epochs"] = requested = options["epochs"]
    run["batch_per_gpu"] = options["batch_size"]
    run["batch"] = run["batch_per_gpu"] * run["gpus"]
    for name in COUNTS:
        if type(run[name]) is not int or not 0 < run[name] < 2**31:
            raise ValueError(f"{name} is {run[name]!r}")
    for number in (run.get("gradient_bytes"), options.get("length")):
        if number is not None and (type(number) is not int or number < 1):
            raise ValueError(f"gradient_bytes or length is {number!r}")
    path = Path(run["script"])
    run["script"] = path.stem
    run["name"] = str(Path(path.parent.name, path.stem))
    run["profiled"] = run.get("profiled") is True
    run["framework"] = "tensorflow" if "tensorflow" in run else "torch"
    run["version"] = str(run.get(run["framework"], ""))
    for name in NUMBERS:
        number = run.get(name)  # not all scripts have all of them
        run[name] = None if number is None else float(number)
        if number is not None and not 0 <= run[name] < float("inf"):
            raise ValueError(f"{name} is {number!r}")
    run["speed"] = run["size"] / run["seconds_per_epoch"]
    run["end"] = datetime.fromisoformat(run["finished"][:19])
    run["processor"] = run["machine"] = run["device"]  # a GPU's name is enough
    if run["processor"].startswith("CPU core"):
        run["machine"] += f", {run['cpus']} x {run['cpu']}"
        # Without Slurm, one machine stands in for all nodes.
        here = run["gpus"] // (run["nodes"] if run["slurm_job"] else 1)
        if here > run["cpus"]:
            run["device"] += f" ({here} share {run['cpus']})"
    run["owner"], run["owners"], run["notes"] = owner, {owner}, []
    ends = run["epoch_ends"][:requested]
    run["epochs"] = len(ends)
    seconds = [end - start for start, end in pairwise(ends)]  # from epoch 2
    if seconds and max(seconds) > MAX_VARIATION * min(seconds):
        text = f"epochs of {min(seconds):.1f} to {max(seconds):.1f} s: repeat"
        script = f"{run['name']} on {run['gpus']} x {run['processor']}"
        run["notes"].append(f"{text} {script} while nothing else runs")
    if run["epochs"] < requested:
        text = f"{owner} ran {run['epochs']} of {requested} epochs".strip()
        run["notes"].append(f"{text}: stopped or resumed")
    return run
