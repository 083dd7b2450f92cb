"""Runs in results.jsonl files, from one person or from a class."""

import json
import sys
from pathlib import Path
from statistics import median

from common.errors import UserError

MAX_VARIATION = 1.5  # the slowest epoch by the fastest; more: the machine was busy


def warn(text):
    print(f"Warning: {text}", file=sys.stderr)


def is_verbose(run):
    return run["options"].get("verbose")


def is_checked(run):
    return run.get("checkup")


def leave_out(runs, reason, which):
    """Return the runs without those that match which(); warn how many match."""
    kept = [run for run in runs if not which(run)]
    if count := len(runs) - len(kept):
        warn(f"left out {count} run{'s' * (count > 1)} {reason}")
    return kept


def read_runs(files):
    """Return the runs in these .jsonl files, a dict each, or raise UserError.

    Lines that are not runs are left out, and so are runs that were slowed down:
    those with --verbose, and those under the checkup.
    """
    runs = []
    for file in files:
        try:
            text = Path(file).read_text("utf-8-sig", errors="replace")
        except OSError as error:
            text = f"cannot read {file}: {error.strerror}"
            raise UserError(f"{text}; run a script first") from None
        broken = []
        lines = [line for line in text.split("\n") if line.strip()]
        for line in dict.fromkeys(lines):  # without repeats
            try:
                runs.append(parse_run(json.loads(line)) | {"file": str(file)})
            except (ValueError, TypeError, LookupError, ArithmeticError) as error:
                broken.append(f"{type(error).__name__}: {error}")
        if broken:
            warn(f"{file}: left out {len(broken)} lines, the first by {broken[0]}")
    runs = leave_out(runs, "with --verbose, which prints in each step", is_verbose)
    runs = leave_out(runs, "under the checkup, which slows them down", is_checked)
    if not runs:
        raise UserError("no results in these files; run a script first")
    return runs


def parse_run(fields):
    """Return a run: the fields that RunLog wrote, and what compare.py needs besides.

    script, name: its stem, without and with the folder in which it was started
    batch: of all GPUs; speed, size: images (or tokens) per second, and per epoch
    processor: a GPU's name, or "CPU core"; machine: with the CPU's name
    epochs: epochs that ran, without fine-tuning; end: of the last, in seconds
    gpus_shared: the number of GPUs that the `gpus` ranks share, or None
    notes: what is unusual about the run, in words
    """
    run = dict.fromkeys(["accuracy", "training_seconds", "gpus_shared"])
    run |= fields | {"notes": []}
    options = run["options"]
    path = Path(run["script"])
    run["script"] = path.stem
    run["name"] = str(Path(path.parent.name, path.stem))
    run["batch_per_gpu"] = options["batch_size"]
    run["batch"] = run["batch_per_gpu"] * run["gpus"]
    run["profiled"] = run.get("profiled") is True
    run["version"] = str(run.get("tensorflow") or run.get("torch"))
    seconds = run["epoch_seconds"][: options["epochs"]]  # later ones fine-tune
    run["epochs"], run["end"] = len(seconds), run["epoch_ends"][-1]
    seconds = seconds[1:] or seconds  # the first epoch warms up
    run["size"] = run["per_epoch"]
    run["speed"] = run["size"] / median(seconds)
    run["processor"] = run["machine"] = run["device"]  # a GPU's name is enough
    if run["processor"].startswith("CPU core"):
        run["machine"] += f", {run['cpus']} x {run['cpu']}"
    if max(seconds) > MAX_VARIATION * min(seconds):
        text = f"epochs of {min(seconds):.1f} to {max(seconds):.1f} s: repeat"
        run["notes"].append(f"{text} {name_row(run)} while nothing else runs")
    if run["epochs"] < options["epochs"]:
        text = f"ran {run['epochs']} of {options['epochs']} epochs"
        run["notes"].append(f"{text}: stopped or resumed")
    return run


def name_processors(row):
    """Return a run's processors and their number: "2 x NVIDIA H200"."""
    if shared := row["gpus_shared"]:
        gpus = f"{shared} {row['processor']}{'s' * (shared > 1)}"
        return f"{row['gpus']} ranks on {gpus}"
    return f"{row['gpus']} x {row['processor']}"


def name_row(row):
    """Return what ran on which processors, as in the first line of a run."""
    return f"{row['name']} on {name_processors(row)}"
