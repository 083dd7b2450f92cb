"""Speed-up and efficiency of runs: tables and a plot.

    cd exercise8
    python ../tools/compare.py logs/results.jsonl
    python ../tools/compare.py logs/class/*/results.jsonl --csv logs/class.csv

Each line is a command. Every option that differs between commands gets a column.

speed-up      images (or tokens) per second relative to the baseline: the fastest run
              on one GPU with the same batch, per GPU or in total, and the same
              options, except for --epochs, --lr, --seed, --optimizer and the like
efficiency    speed-up per GPU
baseline      batch of the baseline, shown if it equals the run's batch in total
memory        peak on rank 0: tensors on its GPU, or without a GPU the whole process
runs          how often the command was run, also with other --epochs or --seed. The
              line shows the median run: the faster of two, the middle one of three
spread        how much faster the fastest run was than the slowest

A note says "repeat" until more than half of a command's runs are within 25 % of the
fastest: other work on the machine can only slow a run down. Ranks that share a GPU
take turns on it, so their runs have no speed-up. Runs with --verbose, which print in
each step, and runs under the checkup are left out. Runs on different machines are
never compared: each machine has its own tables.

With the files of a class, the tables and the plot show all runs together. --csv
writes a file for a spreadsheet, with a line for each command in each file, whose
speed-ups are relative to the same file's runs on one GPU.
"""

import argparse
import csv
import json
from collections import defaultdict
from functools import cache
from pathlib import Path
from textwrap import fill

from common.errors import run as run_main
from pairs import PAIRS
from results import name_processors, name_row, read_runs
from speedup_plot import draw_speedups

# Runs may differ in these and still be compared. --profile covers the first epoch,
# which does not count.
IGNORED_OPTIONS = {"epochs", "finetune_epochs", "lr", "gamma", "optimizer", "seed"}
IGNORED_OPTIONS |= {"batch_size", "test_batch_size", "scheduler", "log_interval"}
IGNORED_OPTIONS |= {"save_model", "resume", "steps", "gpu", "profile"}
# Runs with the same values in these fields, and the same options except for the
# untimed ones, are repeats of one command.
REPEATED = ["name", "gpus", "nodes", "machine", "size", "version", "profiled"]
REPEATED += ["gpus_shared"]
UNTIMED_OPTIONS = {"epochs", "finetune_epochs", "seed"}
# {header: (field of a row, format)}; those that are all empty, 0 or 1 are left out.
COLUMNS = {
    "script": ("name", "{}"),
    "GPUs": ("processors", "{}"),
    "nodes": ("nodes", "{}"),
    "per GPU": ("batch_per_gpu", "{}"),
    "batch": ("batch", "{}"),
    "{unit}/s": ("speed", "{:.1f}"),
    "speed-up": ("speedup", "{:.2f}"),
    "efficiency": ("efficiency", "{:.0%}"),
    "training": ("training_seconds", "{:.1f} s"),
    "accuracy": ("accuracy", "{:.2f} %"),
    "memory": ("peak_memory_gb", "{:.2f} GB"),
    "baseline": ("base_in_total", "{}"),
    "runs": ("runs", "{}"),
    "spread": ("spread", "{:.0%}"),
    "note": ("note", "{}"),
}
CSV_COLUMNS = ["file", "machine", "name", "gpus", "gpus_shared", "nodes", "batch"]
CSV_COLUMNS += ["speed", "unit", "speedup", "efficiency", "epochs", "accuracy"]
CSV_COLUMNS += ["training_seconds", "peak_memory_gb", "runs", "spread", "options"]
MAX_SPREAD, MAX_EFFICIENCY = 0.25, 1.05  # more: the machine was busy
MAX_WIDTH, TITLE_WIDTH = 160, 95  # of a table and of its title, in characters
# Tags of pairs with another training set, or with the same name on both sides
NOT_COMPARED = "DATA", "FIX"
# Tags of pairs whose right side is for several GPUs, also where it ran on one
MULTI_GPU = {"DP", "DDP", "MIRRORED", "TP", "CP", "PP"}
MORE_PAIRS = [("single.py", "multi_worker_mirrored.py", "MIRRORED")]  # in no list


@cache
def find_tags(script):
    """Return the tags of the pairs that lead from a one-GPU script to this one."""
    for left, right, tag, *_ in [*PAIRS, *MORE_PAIRS]:
        if Path(right).stem == script and tag not in NOT_COMPARED:
            return find_tags(Path(left).stem) | {tag}
    return frozenset()


def is_multi_gpu(script):
    """Return whether a script is for several GPUs, also where it ran on one."""
    return bool(MULTI_GPU & find_tags(script))


def summarise(runs):
    """Return the runs of one command as a row: the median run, the faster of two."""
    runs = sorted(runs, key=lambda run: run["speed"])
    row = runs[len(runs) // 2].copy()
    row["notes"] = [*row["notes"]]
    row["speeds"] = [run["speed"] for run in runs]
    row["runs"] = len(runs)
    row["spread"] = runs[-1]["speed"] / runs[0]["speed"] - 1
    row["end"] = max(run["end"] for run in runs)
    row["processors"] = str(row["gpus"])
    if row["gpus_shared"]:
        row["processors"] = name_processors(row)
    slower = runs[-1]["speed"] / runs[(len(runs) - 1) // 2]["speed"] - 1
    if slower > MAX_SPREAD:  # half of the runs, or more, were disturbed
        text = f"spread {row['spread']:.0%}, so the machine was busy"
        row["notes"].append(f"{text}: repeat {name_row(row)}")
    if row["epochs"] == 1:
        row["notes"].append("only one epoch: the first one is slow")
    return row


def comparable_options(run):
    """Return what must be the same in runs that are compared, mostly options."""
    options = {k: v for k, v in run["options"].items() if v is not None}
    amp = "AMP" in find_tags(run["script"])
    options |= {"AMP": amp, "version": run["version"]}
    options["profiled"] = run["profiled"]
    return {k: v for k, v in options.items() if k not in IGNORED_OPTIONS}


def find_baseline(row, bases):
    """Return the baseline of a row, or None, and the batch that they share."""
    batches = [(row["batch_per_gpu"], "per GPU"), (row["batch"], "in total")]
    if "STRONG" in find_tags(row["script"]):
        batches.reverse()
    options = comparable_options(row)
    bases = [base for base in bases if comparable_options(base) == options]
    bases.sort(key=lambda base: base["epochs"] == 1)  # a first epoch is slow
    for batch, kind in batches:
        for base in bases:
            if base["batch"] == batch:
                return base, f"{batch} {kind}"
    return None, ""


def add_speedup(row, bases):
    """Set a row's baseline, speed-up and efficiency, and add notes on them."""
    row["base"] = None
    row["base_batch"] = row["base_in_total"] = ""
    row["speedup"] = row["efficiency"] = None
    if row["gpus_shared"]:
        text = f"no speed-up: {name_processors(row)} take turns"
        row["notes"].append(f"{text}, so their speed says nothing about more GPUs")
        return
    base, row["base_batch"] = find_baseline(row, bases)
    row["base"] = base
    if row["base_batch"].endswith("in total"):
        row["base_in_total"] = row["base_batch"]
    if base is None:
        batches = " or ".join(map(str, sorted({row["batch_per_gpu"], row["batch"]})))
        text = f"no run on one GPU of this machine with batch {batches} and the same"
        row["notes"].append(f"no speed-up: {text} options, version and AMP")
        return
    row["speedup"] = row["speed"] / base["speed"]
    row["efficiency"] = row["speedup"] / row["gpus"]
    if row["efficiency"] > MAX_EFFICIENCY:
        text = f"efficiency {row['efficiency']:.0%}, so the machine was busy"
        row["notes"].append(f"{text}: repeat {name_row(base)} and {name_row(row)}")


def set_differences(rows):
    """Set what differs between rows in row["differs"]; return the other options."""
    more = "cpu", "version", "profiled"
    settings = [row["options"] | {name: row[name] for name in more} for row in rows]
    names, same = dict.fromkeys(name for setting in settings for name in setting), ""
    for row in rows:
        row["differs"] = {}
    for name in ("batch_size", "finetune_epochs", "seed"):  # the first has a column
        names.pop(name, None)
    for name in names:
        values = [setting.get(name) for setting in settings]
        if any(value != values[0] for value in values):
            for row, value in zip(rows, values, strict=True):
                row["differs"][name] = "" if value is None else value
        elif values[0] and name not in IGNORED_OPTIONS.union(more):
            same += f", {name} {values[0]}"
    return same


def compare(runs):
    """Return {title: rows} of comparable runs, a row per command.

    base: the baseline's row, or None; differs: {name: value} of what differs between
    the rows.
    """
    repeats, groups, titled = defaultdict(list), defaultdict(list), {}
    for run in runs:
        options = {
            k: v for k, v in run["options"].items() if k not in UNTIMED_OPTIONS
        }
        command = [options, *(run[name] for name in REPEATED)]
        repeats[json.dumps(command)].append(run)
    for row in map(summarise, repeats.values()):
        size = ""
        if "steps" not in row["options"]:  # else the size grows with the GPUs
            size = f", {row['size']} {row['unit']} an epoch"
        groups[row["machine"], size].append(row)
    for (machine, size), rows in sorted(groups.items()):
        rows.sort(key=lambda row: (row["gpus"], -row["speed"]))
        bases = [row for row in rows if row["gpus"] == 1]
        bases = [row for row in bases if not is_multi_gpu(row["script"])]
        options = set_differences(rows)
        for row in rows:
            add_speedup(row, bases)
        script = (bases or rows)[0]["script"]
        titled[f"{script}{options}, {machine}{size}"] = rows
    return titled


def describe(row):
    """Return the script, nodes, batch and settings of a row."""
    nodes = f", {row['nodes']} nodes" if row["nodes"] > 1 else ""
    batch = f", batch {row['base_batch'] or row['batch']}"
    settings = [f" {k} {v}" for k, v in row["differs"].items() if v != ""]
    return f"{row['name']}{nodes}{batch}{''.join(settings)}"


def make_table(rows):
    """Return the lines of a table, its header first, and the notes below it."""
    notes = list(dict.fromkeys(note for row in rows for note in row["notes"]))
    for row in rows:
        numbers = [i for i, note in enumerate(notes, 1) if note in row["notes"]]
        row["note"] = " ".join(map(str, numbers))
    columns = []
    for header, (name, form) in COLUMNS.items():
        values = [row[name] for row in rows]
        if any(value not in (None, "", 0, 1) for value in values):
            cells = ["" if value is None else form.format(value) for value in values]
            columns.append([header.format(**rows[0]), *cells])
    for name in rows[0]["differs"]:
        columns.append([name, *(str(row["differs"][name]) for row in rows)])
    return list(zip(*columns, strict=True)), notes


def write_csv(file, runs):
    """Write the tables of each results file as one CSV file, a line per command."""
    with open(file, "w", newline="") as stream:
        writer = csv.DictWriter(stream, CSV_COLUMNS, extrasaction="ignore")
        writer.writeheader()
        for source in dict.fromkeys(run["file"] for run in runs):
            groups = compare(run for run in runs if run["file"] == source)
            for rows in groups.values():
                writer.writerows(rows)


def print_table(lines, notes):
    """Print the lines of a table, and below it the numbered notes.

    Columns that do not fit into MAX_WIDTH follow below, beside the first column.
    """
    first, *columns = zip(*lines, strict=True)
    parts = [[first]]
    for column in columns:
        part = [*parts[-1], column]
        width = sum(2 + max(map(len, column)) for column in part) - 2
        if width > MAX_WIDTH and len(part) > 2:
            parts.append([first, column])
        else:
            parts[-1] = part
    for i, part in enumerate(parts):
        print(end="\n" * (i > 0))
        widths = [max(map(len, column)) for column in part]
        for line in zip(*part, strict=True):
            print("  ".join(map(str.rjust, line, widths)))
    for number, note in enumerate(notes, start=1):
        print(fill(f"  {number}: {note}", MAX_WIDTH, subsequent_indent="     "))


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="+", help="results.jsonl files")
    parser.add_argument("--plot", default="logs/speedup.png", help="PNG to write")
    parser.add_argument("--csv", metavar="FILE", help="table to write")
    args = parser.parse_args()
    runs = read_runs(args.files)
    groups = compare(runs)
    for title, rows in groups.items():
        print(f"\n{fill(title, TITLE_WIDTH)}")
        print_table(*make_table(rows))
    print()
    Path(args.plot).parent.mkdir(parents=True, exist_ok=True)
    draw_speedups(groups, describe).savefig(args.plot, dpi=120, bbox_inches="tight")
    print(f"Plot saved to {Path(args.plot).absolute()}")
    if args.csv:
        write_csv(args.csv, runs)
        print(f"Table saved to {Path(args.csv).absolute()}")


if __name__ == "__main__":
    run_main(main)
