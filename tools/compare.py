"""Speed-up and efficiency of runs: tables, a plot, and a page for a class.

    cd exercise8
    python ../tools/compare.py logs/results.jsonl [MORE.jsonl ...]
    python ../tools/compare.py logs/class --html logs/class.html

Each line is a command. Options that differ between the commands have a column each.

speed-up      images (or tokens) per second relative to the baseline: the fastest run
              on one GPU with the same batch, per GPU or in total, and the same
              options, except for --epochs, --lr, --seed, --optimizer and the like
efficiency    speed-up per GPU
memory        peak on rank 0: tensors on its GPU, or without a GPU the whole process
runs          how often the command was run; its line is the median run
spread        how much faster the fastest run was than the slowest
owner         who ran it, by the name of the file or its folder

A second table compares each owner's runs with the owner's own baselines. Runs with
--verbose are left out, since they print in each step. Runs on different machines are
never compared: each machine has its own tables.
"""

import argparse
import json
from collections import defaultdict
from pathlib import Path
from textwrap import fill

from common.errors import UserError
from common.errors import run as run_main
from html_page import write_page
from pairs import PAIRS
from results import find_files, name_owner, name_row, read_runs

# Runs may differ in these and still be compared. --profile covers the first epoch,
# which does not count.
IGNORED_OPTIONS = {"epochs", "finetune_epochs", "lr", "gamma", "optimizer", "seed"}
IGNORED_OPTIONS |= {"batch_size", "test_batch_size", "scheduler", "log_interval"}
IGNORED_OPTIONS |= {"save_model", "resume", "steps", "gpu", "profile"}
# Runs with the same values in these fields are repeats of one command.
REPEATED = ["name", "gpus", "nodes", "machine", "size", "options", "version"]
REPEATED += ["profiled"]
# {header: (field of a row, format)}; those that are all empty, 0 or 1 are left out.
COLUMNS = {
    "script": ("name", "{}"),
    "GPUs": ("gpus", "{}"),
    "nodes": ("nodes", "{}"),
    "per GPU": ("batch_per_gpu", "{}"),
    "batch": ("batch", "{}"),
    "{unit}/s": ("speed", "{:.1f}"),
    "speed-up": ("speedup", "{:.2f}"),
    "efficiency": ("efficiency", "{:.0%}"),
    "training": ("training_seconds", "{:.1f} s"),
    "accuracy": ("accuracy", "{:.2f} %"),
    "memory": ("peak_memory_gb", "{:.2f} GB"),
    "baseline": ("base_batch", "{}"),
    "runs": ("runs", "{}"),
    "spread": ("spread", "{:.0%}"),
    "owner": ("owner", "{}"),
    "note": ("note", "{}"),
}
MAX_SPREAD, MAX_EFFICIENCY = 0.25, 1.05  # more: the machine was busy

# {script: its counterpart on one GPU}, the scripts for several GPUs, and those that
# always use AMP. multi_worker_mirrored.py is in no pair.
BASELINE_OF = {"multi_worker_mirrored": "single"}
MULTI_GPU, AMP = {"multi_worker_mirrored"}, set()
STRONG = {Path(right).stem for _, right, tag, *_ in PAIRS if tag == "STRONG"}
for left, right, tag, *_ in PAIRS:
    left, right = Path(left).stem, Path(right).stem
    if tag != "DATA":
        BASELINE_OF[right] = BASELINE_OF.get(left, left)
    if tag in ("DP", "DDP", "MIRRORED", "TP", "PP") or left in MULTI_GPU:
        MULTI_GPU.add(right)
    if tag == "AMP" or left in AMP:
        AMP.add(right)
SINGLE = {*BASELINE_OF.values()}


def find_single(row, rows):
    """Return the one-GPU script that is the baseline of a row's script.

    A student's script is usually a changed copy: take the baseline of a known script
    among `rows` that has the same options.
    """
    script = row["script"]
    if script in SINGLE or script in BASELINE_OF:
        return BASELINE_OF.get(script, script)
    for other in rows:
        known = other["script"] in SINGLE or other["script"] in BASELINE_OF
        if known and other["options"].keys() == row["options"].keys():
            return BASELINE_OF.get(other["script"], other["script"])
    return script


def summarise(runs):
    """Return the runs of one command as a row: the median run with all notes."""
    runs = sorted(runs, key=lambda run: run["speed"])
    owners = sorted({run["owner"] for run in runs})
    row = runs[(len(runs) - 1) // 2].copy()
    row["runs"] = len(runs)
    row["spread"] = runs[-1]["speed"] / runs[0]["speed"] - 1
    row["owner"] = ", ".join(owners) if len(owners) < 4 else f"{len(owners)} people"
    row["notes"] = [note for run in runs for note in run["notes"]]
    if row["spread"] > MAX_SPREAD:
        text = f"spread {row['spread']:.0%}, so the machine was busy"
        row["notes"].append(f"{text}: repeat {name_row(row)}")
    if row["epochs"] == 1:
        row["notes"].append("only one epoch: the first one is slow")
    return row


def comparable_options(run):
    """Return what must be the same in runs that are compared, mostly options."""
    options = {k: v for k, v in run["options"].items() if v is not None}
    options |= {"AMP": run["script"] in AMP, "version": run["version"]}
    options["profiled"] = run["profiled"]
    return {k: v for k, v in options.items() if k not in IGNORED_OPTIONS}


def find_baseline(row, bases):
    """Return the baseline of a row, or None, and the batch that they share."""
    batches = [(row["batch_per_gpu"], "per GPU"), (row["batch"], "in total")]
    if row["script"] in STRONG:
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
    base, row["base_batch"] = find_baseline(row, bases)
    row["base"], row["speedup"], row["efficiency"] = base, None, None
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
        bases = [r for r in rows if r["gpus"] == 1 and r["script"] not in MULTI_GPU]
        if script in SINGLE:  # a student's script is not a baseline
            bases = [r for r in bases if find_single(r, []) == script]
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
    """Return a table like make_table(), of speed-ups by each owner's own runs."""
    lines = [["owner", "run", "speed-up"]]
    for owner in owners:
        groups = compare([run for run in runs if run["owner"] == owner])
        rows = [row for rows in groups.values() for row in rows if row["gpus"] > 1]
        for row in rows:
            text = f"{row['gpus']} x {row['processor']}: {describe(row)}"
            speedup = f"{row['speedup']:.2f}" if row["base"] else "no baseline"
            lines.append([owner, text, speedup])
        if not rows:
            lines.append([owner, "no run on several GPUs", ""])
    return lines, []


def print_table(lines, notes):
    """Print the lines of a table, and below it the numbered notes."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        print("  ".join(map(str.rjust, line, widths)))
    for number, note in enumerate(notes, start=1):
        print(f"  {number}: {note}")


def plot(groups, file):
    """Plot speed-up over GPUs, a line per configuration, with the ideal line."""
    from matplotlib.figure import Figure

    axes, lines = Figure(figsize=(7, 5)).add_subplot(), defaultdict(list)
    for title, rows in groups.items():
        for row in rows:
            if row["gpus"] > 1 and row["base"]:
                place = f" ({title})" if len(groups) > 1 else ""
                lines[describe(row) + place].append(row)
    for name, rows in lines.items():
        points = [(row["gpus"], row["speedup"]) for row in rows]
        label = f"{name}: {', '.join(f'{y:.2f} on {x}' for x, y in points)}"
        axes.plot(*zip((1, 1), *points, strict=True), "o-", label=fill(label, 64))
    most = max(row["gpus"] for rows in groups.values() for row in rows)
    axes.plot([1, most], [1, most], "--", color="gray", label="ideal")
    axes.set(xlabel="GPUs or CPU cores", ylabel="speed-up")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.legend(fontsize=10, loc="upper left", bbox_to_anchor=(0, -0.12))
    Path(file).parent.mkdir(parents=True, exist_ok=True)
    axes.figure.savefig(file, dpi=120, bbox_inches="tight")
    print(f"Plot saved to {Path(file).absolute()}")
    return axes


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
    owners = sorted({name_owner(file, files) for file in files})
    if len(owners) > 1:
        tables["The pairs of each owner"] = make_owner_table(runs, owners)
    for title, (lines, notes) in tables.items():
        print(f"\n{title}")
        print_table(lines, notes)
    print()
    if args.html:
        write_page(args.html, tables)
    plot(groups, args.plot)


if __name__ == "__main__":
    run_main(main)
