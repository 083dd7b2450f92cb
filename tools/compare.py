"""Speed-up and efficiency of runs: tables, a plot, and a page for a class.

    cd exercise8
    python ../tools/compare.py logs/results.jsonl [MORE.jsonl ...]
    python ../tools/compare.py logs/class --html logs/class.html

Each line is a command. Options that differ between the commands have a column each.

speed-up      images (or tokens) per second relative to the baseline: the fastest run
              on one GPU with the same batch, per GPU or in total, and the same
              options, except for --epochs, --lr, --seed, --optimizer and the like
efficiency    speed-up per GPU
baseline      its batch, where that is equal in total, and not per GPU
memory        peak on rank 0: tensors on its GPU, or without a GPU the whole process
runs          how often the command was run. Its line is the median run: of two runs
              the faster one, of three the one in the middle
spread        how much faster the fastest run was than the slowest
owner         who ran it, by the name of the file or its folder

A note says "repeat" until more than half of a command's runs are within 25 % of the
fastest: other work on the machine can only slow a run down. Ranks that share a GPU
take turns on it, so their runs have no speed-up.

With several owners, a table has a line for each, with the speed-ups relative to the
owner's own runs. --html writes a page with plot and tables for a class. Runs with
--verbose, which print in each step, and runs under the checkup are left out. Runs on
different machines are never compared: each machine has its own tables.
"""

import argparse
import json
from collections import defaultdict
from functools import cache
from pathlib import Path
from textwrap import fill

from common.errors import UserError
from common.errors import run as run_main
from html_page import write_page
from pairs import PAIRS
from results import find_files, name_owners, name_processors, name_row, read_runs
from speedup_plot import draw_speedups

# Runs may differ in these and still be compared. --profile covers the first epoch,
# which does not count.
IGNORED_OPTIONS = {"epochs", "finetune_epochs", "lr", "gamma", "optimizer", "seed"}
IGNORED_OPTIONS |= {"batch_size", "test_batch_size", "scheduler", "log_interval"}
IGNORED_OPTIONS |= {"save_model", "resume", "steps", "gpu", "profile"}
# Runs with the same values in these fields are repeats of one command.
REPEATED = ["name", "gpus", "nodes", "machine", "size", "options", "version"]
REPEATED += ["profiled", "gpus_shared"]
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
    "owner": ("owner", "{}"),
    "note": ("note", "{}"),
}
MAX_SPREAD, MAX_EFFICIENCY = 0.25, 1.05  # more: the machine was busy
MAX_WIDTH, TITLE_WIDTH = 160, 95  # of a table and of its title, in characters
# Tags of pairs with another training set, or with the same name on both sides
NOT_COMPARED = "DATA", "FIX"
# Tags of pairs whose right side is for several GPUs, also where it ran on one
MULTI_GPU = {"DP", "DDP", "MIRRORED", "TP", "CP", "PP"}
MORE_PAIRS = [("single.py", "multi_worker_mirrored.py", "MIRRORED")]  # in no list


@cache
def trace_pairs(script):
    """Return the one-GPU script from which pairs lead to a script, and their tags.

    A script that is on no pair's right side is the first itself.
    """
    for left, right, tag, *_ in [*PAIRS, *MORE_PAIRS]:
        if Path(right).stem == script and tag not in NOT_COMPARED:
            single, tags = trace_pairs(Path(left).stem)
            return single, tags | {tag}
    return script, frozenset()


@cache
def is_known(script):
    """Return whether a script is in a pair."""
    pairs = [*PAIRS, *MORE_PAIRS]
    return script in {Path(file).stem for pair in pairs for file in pair[:2]}


def is_multi_gpu(script):
    """Return whether a script is for several GPUs, also where it ran on one."""
    return bool(MULTI_GPU & trace_pairs(script)[1])


def find_single(row, rows):
    """Return the one-GPU script that is the baseline of a row's script.

    A student's script is usually a changed copy: take the baseline of a known script
    among `rows` that has the same options.
    """
    if not is_known(row["script"]):
        for other in rows:
            same = other["options"].keys() == row["options"].keys()
            if same and is_known(other["script"]):
                return trace_pairs(other["script"])[0]
    return trace_pairs(row["script"])[0]


def summarise(runs):
    """Return the runs of one command as a row: the median run, the faster of two."""
    runs = sorted(runs, key=lambda run: run["speed"])
    owners = sorted({run["owner"] for run in runs})
    row = runs[len(runs) // 2].copy()
    row["notes"] = [*row["notes"]]
    row["speeds"] = [run["speed"] for run in runs]
    row["runs"] = len(runs)
    row["spread"] = runs[-1]["speed"] / runs[0]["speed"] - 1
    row["owner"] = ", ".join(owners) if len(owners) < 4 else f"{len(owners)} people"
    row["processors"] = str(row["gpus"])
    if row["gpus_shared"]:
        row["processors"] = name_processors(row)
    slower = runs[-1]["speed"] / runs[(len(runs) - 1) // 2]["speed"] - 1
    if slower > MAX_SPREAD:  # half of the runs, or more, were disturbed
        text = f"spread {row['spread']:.0%}, so the machine was busy"
        row["notes"].append(f"{text}: repeat {name_row(row)}")
        row["busy"] = True
    if row["epochs"] == 1:
        row["notes"].append("only one epoch: the first one is slow")
    return row


def comparable_options(run):
    """Return what must be the same in runs that are compared, mostly options."""
    options = {k: v for k, v in run["options"].items() if v is not None}
    amp = "AMP" in trace_pairs(run["script"])[1]
    options |= {"AMP": amp, "version": run["version"]}
    options["profiled"] = run["profiled"]
    return {k: v for k, v in options.items() if k not in IGNORED_OPTIONS}


def find_baseline(row, bases):
    """Return the baseline of a row, or None, and the batch that they share."""
    batches = [(row["batch_per_gpu"], "per GPU"), (row["batch"], "in total")]
    if "STRONG" in trace_pairs(row["script"])[1]:
        batches.reverse()
    options = comparable_options(row)
    bases = [base for base in bases if comparable_options(base) == options]
    epochs = row["epochs"]
    bases.sort(key=lambda base: (base["epochs"] != epochs, base["epochs"] == 1))
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
        row["busy"] = True


def set_differences(rows):
    """Set what differs between rows in row["differs"]; return the other options."""
    more = "cpu", "version", "profiled"
    settings = [row["options"] | {name: row[name] for name in more} for row in rows]
    names, same = dict.fromkeys(name for setting in settings for name in setting), ""
    for row in rows:
        row["differs"] = {}
    names.pop("batch_size", None)  # it has a column
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
        repeats[json.dumps([run[name] for name in REPEATED])].append(run)
    summaries = [summarise(rows) for rows in repeats.values()]
    for row in summaries:
        script, size = find_single(row, summaries), ""
        if "steps" not in row["options"]:  # else the size grows with the GPUs
            size = f", {row['size']} {row['unit']} an epoch"
        groups[row["machine"], script, size].append(row)
    for (machine, script, size), rows in sorted(groups.items()):
        rows.sort(key=lambda row: (row["gpus"], -row["speed"]))
        bases = [row for row in rows if row["gpus"] == 1]
        bases = [row for row in bases if not is_multi_gpu(row["script"])]
        if is_known(script):  # a student's script is not a baseline
            bases = [row for row in bases if find_single(row, []) == script]
        options = set_differences(rows)
        for row in rows:
            add_speedup(row, bases)
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


def make_owner_table(runs, owners):
    """Return a table like make_table(): a line per owner, a column per command.

    It has the speed-ups relative to each owner's own runs on one GPU.
    """
    owned, speedups = defaultdict(list), {owner: {} for owner in owners}
    for run in runs:
        owned[run["owner"]].append(run)
    for owner in owners:
        for rows in compare(owned[owner]).values():
            for row in rows:
                if row["gpus"] > 1:
                    speedup = (
                        f"{row['speedup']:.2f}" if row["base"] else "no baseline"
                    )
                    speedup = "shared GPU" if row["gpus_shared"] else speedup
                    command = row["gpus"], f"{describe(row)} on {row['processor']}"
                    speedups[owner][command] = speedup
    commands = sorted({command for row in speedups.values() for command in row})
    notes = list(dict.fromkeys(text for _, text in commands))
    header = [f"{gpus} GPUs ({notes.index(text) + 1})" for gpus, text in commands]
    lines = [["owner", *header]]
    for owner in owners:
        found = speedups[owner]
        lines.append([owner, *(found.get(command, "-") for command in commands)])
    return lines, notes


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
    parser.add_argument("files", nargs="+", help="results.jsonl files or folders")
    parser.add_argument("--plot", default="logs/speedup.png", help="PNG to write")
    parser.add_argument("--html", help="page to write")
    args = parser.parse_args()
    if args.html and not args.html.endswith(".html"):
        raise UserError(f"--html {args.html} is not a page; give it a name.html")
    files = find_files(args.files)
    runs = read_runs(files)
    groups = compare(runs)
    tables = {title: make_table(rows) for title, rows in groups.items()}
    owners = sorted({*name_owners(files).values()})
    if len(owners) > 1:
        title = "Each owner's speed-ups, relative to the owner's own run on one GPU"
        tables = {title: make_owner_table(runs, owners)} | tables
    for title, (lines, notes) in tables.items():
        print(f"\n{fill(title, TITLE_WIDTH)}")
        print_table(lines, notes)
    print()
    figure = draw_speedups(groups, describe)
    Path(args.plot).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(args.plot, dpi=120, bbox_inches="tight")
    print(f"Plot saved to {Path(args.plot).absolute()}")
    if args.html:
        write_page(args.html, figure, tables)
        print(f"Page saved to {Path(args.html).absolute()}")


if __name__ == "__main__":
    run_main(main)
