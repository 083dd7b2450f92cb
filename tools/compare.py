"""Speed-up and efficiency of runs: tables, a plot, and a page for a class.

    cd exercise8
    python ../tools/compare.py logs/results.jsonl [MORE.jsonl ...]
    python ../tools/compare.py logs/class --html logs/class.html

Each line is a command. Options that differ between the commands have a column each.

baseline      the batch of the baseline, per GPU or in total: the fastest run on one
              GPU with the same options, except for --epochs, --lr, --seed,
              --optimizer and the like. A run with the same --epochs is preferred
speed-up      images (or tokens) per second relative to the baseline
efficiency    speed-up per GPU
training      seconds for --epochs epochs, with validation
accuracy      on the test or validation set, as the script printed it last
memory        peak on rank 0: tensors on its GPU, or without a GPU the whole process
runs          how often the command was run: the table shows the median run, or the
              slower one of two
spread        how much faster the fastest run was than the slowest
owner         who ran it, by the name of the file or its folder, if there are several
note          why there is no baseline, or what is unusual about the runs

A second table has a line for each owner, with speed-ups relative to the owner's own
baselines. Runs with --verbose are left out, since they print in each step.

"8 share 2" means that 8 processes shared 2 CPU cores. Runs on different machines are
never compared: each machine has its own tables.
"""

import argparse
import json
import signal
from collections import defaultdict
from itertools import zip_longest
from pathlib import Path
from textwrap import fill

from html_page import check_name, write_page
from results import find_files, name_owner, printable, read_runs

from common.errors import UserError
from common.errors import run as run_main
from pairs import PAIRS

# Runs may differ in these and still be compared. --profile covers the first epoch,
# which does not count.
IGNORED_OPTIONS = {"epochs", "finetune_epochs", "lr", "gamma", "optimizer", "seed"}
IGNORED_OPTIONS |= {"batch_size", "test_batch_size", "scheduler", "log_interval"}
IGNORED_OPTIONS |= {"save_model", "resume", "steps", "gpu", "profile"}
# Runs with the same values in these fields are repeats of one command.
REPEATED = ["name", "gpus", "nodes", "machine", "device", "batch_per_gpu", "batch"]
REPEATED += ["size", "options", "version", "profiled"]
# {header: (field of a row, format)}
COLUMNS = {
    "script": ("name", "{}"),
    "GPUs": ("gpus", "{}"),
    "nodes": ("nodes", "{}"),
    "per GPU": ("batch_per_gpu", "{}"),
    "batch": ("batch", "{}"),
    "s/epoch": ("seconds_per_epoch", "{:.2f}"),
    "{unit}/s": ("speed", "{:.1f}"),
    "speed-up": ("speedup", "{:.2f}"),
    "efficiency": ("efficiency", "{:.0%}"),
    "training": ("training_seconds", "{:.1f} s"),
    "accuracy": ("accuracy", "{:.2f} %"),
    "memory": ("peak_memory_gb", "{:.2f} GB"),
}
# Shown if rows differ in them; owner, runs, spread and note if they have content.
OPTIONAL_COLUMNS = {
    "baseline": ("base_batch", "{}"),
    "device": ("device", "{}"),
    "runs": ("runs", "{}"),
    "spread": ("spread", "{:.0%}"),
    "owner": ("owner", "{}"),
    "note": ("note", "{}"),
}

# Of the plot: characters in a line of the legend, and a marker for each line.
LEGEND_WIDTH = 64
MARKERS = "os^DvPX*"

# Larger values mean that the machine was busy.
MAX_SPREAD = 0.25
MAX_EFFICIENCY = 1.05

# {script: its counterpart on one GPU}, the scripts for several GPUs, and those that
# always use AMP. multi_worker_mirrored.py is in no pair.
BASELINE_OF = {"multi_worker_mirrored": "single"}
MULTI_GPU, AMP = {"multi_worker_mirrored"}, set()
STRONG = {Path(right).stem for _, right, tag, _ in PAIRS if tag == "STRONG"}
for left, right, tag, _ in PAIRS:
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

    A student's script is usually a changed copy, with the options of the original:
    take the baseline of a known script among `rows` that has the same options.
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
    # {header of a column: value}, shown where rows differ.
    row["settings"] = {flag(name): value for name, value in row["options"].items()}
    row["settings"] |= {"CPU": row["cpu"], row["framework"]: row["version"]}
    row["settings"]["profiler"] = "line_profiler" if row["profiled"] else None
    return row


def name_row(row):
    """Return what ran on which processors, as in the first line of a run."""
    return f"{row['name']} on {row['gpus']} x {row['processor']}"


def flag(name):
    """Return an option as on the command line."""
    return "--" + name.replace("_", "-")


def comparable_options(run):
    """Return the options that must be the same in runs that are compared."""
    options = run["options"].items()
    return {k: v for k, v in options if k not in IGNORED_OPTIONS and v is not None}


def lacks_amp(base, row):
    """Return whether only the row uses AMP, which adds to its speed-up."""
    return row["gpus"] > 1 and row["script"] in AMP and base["script"] not in AMP


def rank_base(base, row):
    """Return a key that sorts the best baseline for a row first."""
    differ = [base[name] != row[name] for name in ("version", "profiled", "epochs")]
    return lacks_amp(base, row), *differ, base["epochs"] == 1


def find_baseline(row, bases):
    """Return the baseline of a row, or None, and the batch that they share."""
    batches = [(row["batch_per_gpu"], "per GPU"), (row["batch"], "in total")]
    if row["script"] in STRONG:
        batches.reverse()
    options = comparable_options(row)
    bases = [base for base in bases if comparable_options(base) == options]
    bases.sort(key=lambda base: rank_base(base, row))  # then the fastest first
    for batch, kind in batches:
        for base in bases:
            if base["batch"] == batch:
                return base, f"{batch} {kind}"
    return None, ""


def explain_no_baseline(row, bases):
    """Return why none of these is a baseline for a row."""
    if not bases:
        return "no run on one GPU of this machine with this data"
    options, differing = comparable_options(row), []
    for base in bases:
        others = comparable_options(base)
        names = options | others
        names = [name for name in names if options.get(name) != others.get(name)]
        differing.append(", ".join(map(flag, names)))
    if all(differing):
        return f"runs on one GPU have another {min(differing, key=len)}"
    batches = f"{row['batch_per_gpu']} or {row['batch']}"
    return f"no run on one GPU with batch {batches}"


def add_speedup(row, bases):
    """Set a row's baseline, speed-up and efficiency, and add notes on them."""
    base, row["base_batch"] = find_baseline(row, bases)
    row["base"], row["speedup"], row["efficiency"] = base, None, None
    if base is None:
        row["notes"].append(f"no speed-up: {explain_no_baseline(row, bases)}")
        return
    row["speedup"] = row["speed"] / base["speed"]
    row["efficiency"] = row["speedup"] / row["gpus"]
    reasons = []
    if lacks_amp(base, row):
        reasons.append(f"compared with {base['name']}, which has no AMP")
    if base["version"] != row["version"]:
        reasons.append(f"compared with {base['framework']} {base['version']}")
    if base["profiled"] != row["profiled"]:
        kind = "profiled" if row["profiled"] else "not profiled"
        reasons.append(f"{kind}, unlike the baseline")
    if base["epochs"] == 1 < row["epochs"]:
        reasons.append("compared with only one epoch: the first one is slow")
    if row["efficiency"] > MAX_EFFICIENCY and not reasons:
        text = f"efficiency {row['efficiency']:.0%}, so the machine was busy"
        reasons.append(f"{text}: repeat {name_row(base)} and {name_row(row)}")
    row["notes"] += reasons


def find_differences(rows):
    """Return the settings in which rows differ, and the other options as typed."""
    names = dict.fromkeys(name for row in rows for name in row["settings"])
    ignored = {flag(name) for name in IGNORED_OPTIONS}
    names.pop("--batch-size", None)  # it has a column
    differing, same = [], ""
    for name in names:
        value, *others = [row["settings"].get(name) for row in rows]
        if any(other != value for other in others):
            differing.append(name)
        elif name.startswith("--") and name not in ignored and value:
            same += f" {name}"
            if value is not True:
                same += f" {value}"
    return differing, same


def compare(runs):
    """Return {title: rows} of comparable runs, rows with the fewest GPUs first.

    Each command is one row. base: the baseline's row, or None; differs: {header:
    value} of the settings in which rows of this title differ; notes: why there is no
    baseline, or what is unusual.
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
    machines = {machine for machine, *_ in groups}
    for (machine, script, size), rows in sorted(groups.items()):
        rows.sort(key=lambda row: (row["gpus"], -row["speed"]))
        bases = [r for r in rows if r["gpus"] == 1 and r["script"] not in MULTI_GPU]
        if script in SINGLE:  # a student's script is not a baseline
            bases = [r for r in bases if find_single(r, []) == script]
        differing, options = find_differences(rows)
        for row in rows:
            add_speedup(row, bases)
            values = {name: row["settings"].get(name) for name in differing}
            row["differs"] = {k: "" if v is None else v for k, v in values.items()}
        several = len(machines) > 1 or rows[0]["owner"]
        place = machine if several else rows[0]["processor"]
        title = f"{script}.py{options}  # {place}{size}"  # can be pasted in a shell
        titled[printable(title)] = rows
    return titled


def describe(row):
    """Return the script, nodes, batch and settings of a row."""
    nodes = f", {row['nodes']} nodes" if row["nodes"] > 1 else ""
    batch = f", batch {row['base_batch'] or row['batch']}"
    settings = [f" {k} {v}" for k, v in row["differs"].items() if v != ""]
    return printable(f"{row['name']}{nodes}{batch}{''.join(settings)}")


def number_notes(rows):
    """Return all notes, and set row["note"] to the numbers of a row's notes."""
    notes = list(dict.fromkeys(note for row in rows for note in row["notes"]))
    for row in rows:
        numbers = [i for i, note in enumerate(notes, 1) if note in row["notes"]]
        row["note"] = " ".join(map(str, numbers))
    return notes


def make_table(rows):
    """Return the lines of a table, its header first, and the notes below it."""
    notes, columns = number_notes(rows), dict(COLUMNS)
    for header, (name, form) in OPTIONAL_COLUMNS.items():
        differ = len({row[name] for row in rows}) > 1
        has_content = header not in ("baseline", "device")
        has_content = has_content and rows[0][name] not in ("", 0, 1)
        if differ or has_content:
            columns[header] = name, form
    header = [text.format(**rows[0]) for text in columns]
    lines = [[*header, *rows[0]["differs"]]]
    for row in rows:
        cells = []
        for name, form in columns.values():
            cells.append("" if row[name] is None else form.format(row[name]))
        lines.append([*cells, *map(str, row["differs"].values())])
    return lines, notes


def make_owner_table(runs, owners):
    """Return a table like make_table(), with a line for each owner.

    Each owner's runs are compared only with each other. A cell with several values,
    one for each pair of runs, has several lines.
    """
    rows = []
    for owner in owners:
        own = [run for run in runs if owner in run["owners"]]
        compared = [row for group in compare(own).values() for row in group]
        notes = [note for row in compared for note in row["notes"]]
        pairs, speedups = [], []
        for row in compared:
            if row["base"] and row["base"]["name"] == row["name"]:
                continue  # a baseline
            processors = f"{row['gpus']} x {row['processor']}"
            pairs.append(f"{processors}: {describe(row)}")
            speedups.append(f"{row['speedup']:.2f}" if row["base"] else "-")
        if not pairs:
            notes.append("only baselines" if own else "no runs")
        cells = [owner, str(len(own)), "\n".join(pairs), "\n".join(speedups)]
        rows.append({"cells": cells, "notes": notes})
    notes = number_notes(rows)
    header = ["owner", "runs", "pairs", "speed-up", "note"]
    return [header, *([*row["cells"], row["note"]] for row in rows)], notes


def print_table(lines, notes):
    """Print the lines of a table, and below it the numbered notes."""
    cells = [[cell.split("\n") for cell in line] for line in lines]
    lines = [line for parts in cells for line in zip_longest(*parts, fillvalue="")]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        print(printable("  ".join(map(str.rjust, line, widths))))
    for number, note in enumerate(notes, start=1):
        print(printable(f"  {number}: {note}"))


def wrap_label(text):
    """Return a text as a label of the plot's legend."""
    text = text.replace("$", r"\$")  # else it begins a formula
    return fill(text, LEGEND_WIDTH, break_on_hyphens=False)


def plot(groups):
    """Return a figure of speed-up over GPUs, with the ideal line."""
    from matplotlib.figure import Figure

    axes, lines, most = Figure(figsize=(7, 5)).add_subplot(), defaultdict(list), 1
    for title, rows in groups.items():
        most = max(most, rows[-1]["gpus"])
        for row in rows:
            if row["gpus"] > 1 and row["base"]:
                lines[title, describe(row)].append(row)
    titles = set()
    for number, ((title, name), rows) in enumerate(lines.items()):
        if len(groups) > 1 and title not in titles:
            heading = wrap_label(title)  # in the legend alone
            axes.plot([], [], " ", color="white", label=heading)
            titles.add(title)
        points = [(row["gpus"], row["speedup"]) for row in rows]
        speedups = ", ".join(f"{y:.2f} on {x}" for x, y in points)
        style, label = MARKERS[number % len(MARKERS)] + "-", f"{name}: {speedups}"
        points = zip((1, 1), *points, strict=True)
        axes.plot(*points, style, label=wrap_label(label))
    axes.plot([1, most], [1, most], "--", color="gray", label="ideal")
    axes.set(xlabel="GPUs or CPU cores", ylabel="speed-up")
    axes.xaxis.get_major_locator().set_params(integer=True)
    below = {"loc": "upper left", "bbox_to_anchor": (0, -0.12, 1, 0)}
    axes.legend(fontsize=10, mode="expand", borderaxespad=0, **below)
    return axes.figure


def save(figure, file):
    """Write a figure to this file, or raise UserError."""
    try:
        Path(file).parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(file, dpi=120, bbox_inches="tight")
    except (OSError, ValueError) as error:  # matplotlib's, for an unknown suffix
        raise UserError(f"cannot write {file}: {error}") from None


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "files", nargs="+", metavar="RESULTS.jsonl", help="result files or folders"
    )
    parser.add_argument("--plot", default="logs/speedup.png", help="PNG to write")
    parser.add_argument(
        "--html", type=check_name, help="HTML page to write; default: none"
    )
    args = parser.parse_args()
    files = find_files(args.files)
    runs, tables = read_runs(files), {}
    groups = compare(runs)
    for title, rows in groups.items():
        tables[title] = make_table(rows)
    owners = sorted({name_owner(file, files) for file in files})
    if len(owners) > 1:
        tables["The pairs of each owner"] = make_owner_table(runs, owners)
    for title, (lines, notes) in tables.items():
        print(f"\n{title}")
        print_table(lines, notes)
    print()
    if args.html:
        write_page(args.html, tables)
        print(f"Page saved to {Path(args.html).absolute()}")
    try:
        figure = plot(groups)
    except ModuleNotFoundError:
        raise UserError("no matplotlib; run `pip install matplotlib`") from None
    save(figure, args.plot)
    print(f"Plot saved to {Path(args.plot).absolute()}")


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends without an error
    run_main(main)
