"""The runs in results.jsonl files, of one person or of a class.

Anybody's file may hold anything: what is no run is named and left out.
"""

import json
import os
import re
import sys
from datetime import datetime
from pathlib import Path

from common.cli import UserError

# What parse_run() may raise for a line that RunLog did not write.
NO_RUN = ValueError, TypeError, LookupError, OverflowError, RecursionError
COUNTS = "gpus", "nodes", "batch", "batch_per_gpu", "size", "epochs"
NUMBERS = "seconds_per_epoch", "training_seconds", "accuracy", "peak_memory_gb"


def printable(text):
    """Return a text without what a terminal would obey."""
    return "".join(c if c.isprintable() else "?" for c in text)


def warn(text):
    print(f"Warning: {printable(text)}", file=sys.stderr)


def find_files(names):
    """Return the .jsonl files that these files and folders are, each once."""
    files = {}
    for path in map(Path, names):
        found = sorted(path.rglob("*.jsonl")) if path.is_dir() else [path]
        if not found:
            warn(f"no .jsonl file in {path}")
        for file in found:
            files.setdefault(file.resolve(), file)
    return list(files.values())


def name_owner(file, files):
    """Return whose file of these it is: its path below the folder of them all."""
    if len(files) == 1:
        return ""
    folder = os.path.commonpath([os.path.abspath(os.path.dirname(f)) for f in files])
    name = os.path.relpath(file, folder).removesuffix(".jsonl")
    return name.removesuffix("/results").removesuffix("/logs")


def read_runs(files):
    """Return the runs in these .jsonl files, a dict each, or raise UserError.

    A line that is no run is left out; a line that several files have is one run.
    Runs with --verbose are left out: their times are those of printing.
    """
    runs = {}  # {line: run}
    for file in files:
        try:
            text = Path(file).read_text("utf-8-sig", errors="replace")
        except OSError as error:
            text = f"cannot read {file}: {error.strerror}"
            raise UserError(f"{text}; run a script first") from None
        who, broken = name_owner(file, files), []
        if not text.strip():
            warn(f"{file} is empty")
            continue
        # splitlines() would also split at U+2028.
        lines = text.rstrip("\n").split("\n")
        for number, line in enumerate(lines, start=1):
            try:
                run = parse_run(json.loads(line), who)
            except NO_RUN as error:
                broken.append(f"line {number}, {type(error).__name__}: {error}")
                continue
            if line in runs:
                again = f"there again in the file of {who}" if who else "there again"
                runs[line]["notes"].append(f"{again}: counts once")
            runs.setdefault(line, run)
        if broken:
            warn(f"{file}: lines left out: {len(broken)}, first {broken[0]}")
    silent = [run for run in runs.values() if not run["options"].get("verbose")]
    if len(silent) < len(runs):
        count = len(runs) - len(silent)
        warn(f"runs left out: {count}, since --verbose prints in each step")
    if not silent:
        names = ", ".join(map(str, files))
        raise UserError(f"no results in {names}: run a script first")
    return silent


def parse_run(fields, who=""):
    """Return a run: the fields that RunLog wrote, and what compare.py needs besides.

    speed, size: a second, and of an epoch, in images or what else it counts
    machine: runs on the same one can be compared; where: its GPU, or "CPU core"
    end: when it ended, as the clocks there showed it
    epochs: that were made, without those of fine-tuning, which do not count
    who: whose run it is; notes: in words, what is unusual about it

    Raises one of NO_RUN if RunLog did not write these fields.
    """
    run = {"counts": "images", "cpus": "?", "cpu": "unknown CPU", **fields}
    run["size"] = run[f"{run['counts']}_per_epoch"]
    run["epochs"] = asked = run["options"]["epochs"]
    for name in COUNTS:
        if type(run[name]) is not int or not 0 < run[name] < 2**31:
            raise ValueError(f"{name} is {run[name]!r}")
    for number in (run.get("gradient_bytes"), run["options"].get("length")):
        if number is not None and (type(number) is not int or number < 1):
            raise ValueError(f"gradient_bytes or length is {number!r}")
    if not isinstance(run["script"], str):
        raise TypeError(f"script is {run['script']!r}")
    run["framework"] = "tensorflow" if "tensorflow" in run else "torch"
    run["version"] = str(run.get(run["framework"], ""))
    run["speed"] = float(run[f"{run['counts']}_per_second"])
    if not 0 < run["speed"] < float("inf"):
        raise ValueError(f"its speed is {run['speed']}")
    for name in NUMBERS:
        number = run.get(name)  # not all scripts have all of them
        run[name] = None if number is None else float(number)
        if number is not None and not 0 <= run[name] < float("inf"):
            raise ValueError(f"{name} is {number!r}")
    run["end"] = datetime.fromisoformat(run["finished"][:19])
    run["where"] = run["machine"] = re.sub(r" \(\d+ share \d+\)", "", run["device"])
    if run["where"].startswith("CPU core"):  # a GPU is the machine by itself
        run["machine"] += f", {run['cpus']} x {run['cpu']}"
    run["who"], run["notes"] = who, []
    if "epoch_ends" in run:  # TensorFlow's runs have none
        run["epochs"] = min(len(run["epoch_ends"]), asked)
    if run["epochs"] < asked:
        made = f"{who} made {run['epochs']} of {asked} epochs".strip()
        run["notes"].append(f"{made}: stopped, or resumed")
    return run
