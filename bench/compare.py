"""Compares runs: a table with speed-up and efficiency, and a plot.

    cd exercise8
    python ../bench/compare.py logs/results.jsonl [MORE.jsonl ...]
    python ../bench/compare.py logs/results.jsonl --since 14:30

A script and its twins stand together. An option in which runs differ is a column.

runs          of the same command: the row shows the middle one (of two the slower),
              spread how much faster the fastest was than the slowest
speed-up      against the fastest run of a script for one GPU with the same options,
              but for --epochs, --lr, --seed, --optimizer and the like, and with the
              batch in the column "against"; none without such a run
efficiency    the speed-up for each GPU
training      seconds for --epochs epochs, with validation
accuracy      what the script's last line on it says: of the test, or the validation
memory        the most that rank 0 had: of the tensors on its GPU, or without a GPU
              of the whole process

"8 share 2" says that 8 processes shared 2 CPU cores. For a fresh start use --since,
or delete the file.
"""

import json
import math
import re
import signal
import sys
from collections import defaultdict
from datetime import date, datetime
from pathlib import Path

from common.cli import OptionParser, UserError
from pairs import PAIRS

# Runs that differ in these options alone are held against each other.
FREE = {"epochs", "finetune_epochs", "batch_size", "test_batch_size", "lr", "gamma"}
FREE |= {"seed", "optimizer", "scheduler", "log_interval", "save_model", "resume"}
FREE |= {"profile", "steps", "gpu"}  # what is profiled is in the first epoch
# Runs that are alike in these are repeats.
KEY = (
    "script",
    "gpus",
    "nodes",
    "device",
    "batch_per_gpu",
    "batch",
    "size",
    "options",
)
COLUMNS = {
    "script": "{script}",
    "GPUs": "{gpus}",
    "nodes": "{nodes}",
    "per GPU": "{batch_per_gpu}",
    "batch": "{batch}",
    "s/epoch": "{seconds_per_epoch:.2f}",
    "{counts}/s": "{speed:.1f}",
    "speed-up": "{speedup:.2f}",
    "efficiency": "{efficiency:.0%}",
    "training": "{training_seconds:.1f} s",
    "accuracy": "{accuracy:.2f} %",
    "memory": "{peak_memory_gb:.2f} GB",
}
SOMETIMES = {"against": "{against}", "device": "{device}", "runs": "{runs}"}
SOMETIMES["spread"] = "{spread:.0%}"

# Of the pairs: {script: the first of its twins}, and those that want several GPUs.
PLAIN = {"multi_worker_mirrored": "single"}  # no pair: it writes its step out
MANY, STRONG = {"multi_worker_mirrored"}, set()
for left, right, tag, _ in PAIRS:
    left, right = Path(left).stem, Path(right).stem
    if tag != "DATA":
        PLAIN[right] = PLAIN.get(left, left)
    if tag in ("DP", "DDP", "MIRRORED", "STRONG"):
        MANY.add(right)
    if tag == "STRONG":
        STRONG.add(right)


def read_runs(files, since=None):
    """Return the runs in these .jsonl files, a dict each, or raise UserError.

    since: a datetime; runs that ended before it are left out. A line that is no run
    is named, and left out.
    """
    runs = []
    for file in files:
        try:
            lines = Path(file).read_text(errors="replace").splitlines()
        except OSError as error:
            raise UserError(f"cannot read {file}: {error.strerror}") from None
        for number, line in enumerate(lines, start=1):
            try:
                run = prepare(json.loads(line))
            except (ValueError, TypeError, LookupError, AttributeError):
                text = f"Warning: line {number} of {file} is no whole run: left out"
                print(text, file=sys.stderr)
                continue
            if not since or run["end"] >= since:
                runs.append(run)
    if not runs:
        when = f" since {since}" if since else ""
        raise UserError(
            f"no results in {', '.join(files)}{when}: run a script first"
        )
    return runs


def prepare(run):
    """Return a run with its speed and end, and nan for what an older version lacks.

    Raises an error of some kind if that is no run.
    """
    lacking = "seconds_per_epoch", "training_seconds", "accuracy", "peak_memory_gb"
    run = dict.fromkeys(lacking, math.nan) | {"counts": "images", "nodes": 1} | run
    run["speed"] = run[f"{run['counts']}_per_second"]
    run["size"] = run[f"{run['counts']}_per_epoch"]
    run["end"] = datetime.fromisoformat(run["finished"][:19])  # as clocks showed it
    if (
        not run["speed"] > 0
        or not {*KEY} <= {*run}
        or "epochs" not in run["options"]
    ):
        raise ValueError("not what RunLog writes")
    return run


def summarise(runs):
    """Return runs of one command as one: the middle one, with runs and spread."""
    runs = sorted(runs, key=lambda run: run["speed"])
    middle = runs[(len(runs) - 1) // 2]
    spread = runs[-1]["speed"] / runs[0]["speed"] - 1
    return middle | {"runs": len(runs), "spread": spread}


def typed(name):
    return "--" + name.replace("_", "-")


def fixed(run):
    """Return the options that must be alike in runs held against each other."""
    options = run["options"].items()
    return {k: v for k, v in options if k not in FREE and v is not None}


def find_base(row, rows):
    """Return the run that a row is held against, or None, and by which batch."""
    alike = [
        base
        for base in rows
        if base["gpus"] == 1
        and base["script"] not in MANY
        and fixed(base) == fixed(row)
    ]
    ways = [("batch_per_gpu", "per GPU"), ("batch", "in all")]
    for batch, how in reversed(ways) if row["script"] in STRONG else ways:
        for base in alike:  # the fastest first
            if base["batch"] == row[batch]:
                return base, f"{row[batch]} {how}"
    return None, ""


def find_differences(rows):
    """Return which options differ between rows, and the others as they are typed."""
    names = dict.fromkeys(name for row in rows for name in row["options"])
    differs, alike = [], ""
    for name in [name for name in names if name != "batch_size"]:  # it has a column
        value, *others = [row["options"].get(name) for row in rows]
        if any(other != value for other in others):
            differs.append(name)
        elif name not in FREE and value not in (None, False):
            alike += (
                f" {typed(name)}" if value is True else f" {typed(name)} {value}"
            )
    return differs, alike


def compare(runs):
    """Return {title: runs}: those that can be compared, the fewest GPUs first.

    Those of one command are one. Each gets its speed, in images/s or what it counts,
    its base, the run that it is held against, or None, and differs: the options in
    which runs under this title are not alike, as they are typed, and its own values.
    """
    same, groups, titled = defaultdict(list), defaultdict(list), {}
    for run in runs:
        same[json.dumps([run[name] for name in KEY])].append(run)
    for row in map(summarise, same.values()):
        where = re.sub(r" \(.* share .*\)", "", row["device"])
        if "steps" not in row["options"]:  # else an epoch has what N GPUs do in them
            where += f", {row['size']} {row['counts']} an epoch"
        groups[PLAIN.get(row["script"], row["script"]), where].append(row)
    for (script, where), rows in groups.items():
        rows.sort(key=lambda row: (row["gpus"], -row["speed"]))
        differs, alike = find_differences(rows)
        for row in rows:
            row["base"], row["against"] = base, _ = find_base(row, rows)
            own = {typed(name): row["options"].get(name) for name in differs}
            row["differs"] = {k: "" if v is None else v for k, v in own.items()}
            if base:
                row["speedup"] = row["speed"] / base["speed"]
                row["efficiency"] = row["speedup"] / row["gpus"]
        titled[f"{script}.py{alike}  # {where}"] = rows  # it can be typed
    return titled


def print_table(rows):
    columns = dict(COLUMNS)
    for name, form in SOMETIMES.items():
        if len({row[name] for row in rows}) > 1:
            columns[name] = form
    for name in rows[0]["differs"]:
        columns[name] = "{differs[" + name + "]}"
    cells = [[name.format(**rows[0]) for name in columns]]
    for row in rows:
        row = {"speedup": math.nan, "efficiency": math.nan, **row}
        cells.append([form.format(**row) for form in columns.values()])
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for line in cells:
        line = ["" if cell.startswith("nan") else cell for cell in line]
        print("  ".join(c.rjust(w) for c, w in zip(line, widths, strict=True)))


def draw(groups, file):
    """Save a PNG of the speed-up over the GPUs, a line each, and of the ideal."""
    from matplotlib.figure import Figure

    axes, lines = Figure(figsize=(7, 5)).add_subplot(), defaultdict(dict)
    for title, rows in groups.items():
        for row in [row for row in rows if row["base"] and row["gpus"] > 1]:
            nodes = f", {row['nodes']} nodes" * (row["nodes"] > 1)
            options = [f" {k} {v}" for k, v in row["differs"].items() if v != ""]
            name = (
                f"{row['script']}{nodes}, batch {row['against']}{''.join(options)}"
            )
            lines[title, name][row["gpus"]] = row["speedup"]
    for (title, name), line in lines.items():
        label = f"{name}: " + ", ".join(f"{y:.2f} on {x}" for x, y in line.items())
        label += f"\n{title}" * (len(groups) > 1)
        axes.plot([1, *line], [1, *line.values()], "o-", label=label)
    ends = [1, max(row["gpus"] for rows in groups.values() for row in rows)]
    axes.plot(ends, ends, "--", color="gray", label="ideal")
    axes.set(xlabel="GPUs, or CPU cores in their place", ylabel="speed-up")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.legend(fontsize="small", loc="upper left", bbox_to_anchor=(0, -0.12))
    save(axes.figure, file)


def save(figure, file):
    """Write a plot to this file, or raise UserError."""
    try:
        Path(file).parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(file, dpi=120, bbox_inches="tight")
    except (OSError, ValueError) as error:  # an ending that matplotlib does not know
        raise UserError(f"cannot write {file}: {error}") from None


def moment(text):
    """A type for options: 14:30 (of today), 2026-11-21, or both with a space."""
    text = text if "-" in text else f"{date.today()} {text}"
    return datetime.fromisoformat(text).replace(tzinfo=None)


def main():
    parser = OptionParser(__doc__)
    add = parser.add_argument
    add("files", nargs="+", metavar="RESULTS.jsonl", help="of runs")
    add("--since", type=moment, help="14:30, or 2026-11-21; default: all runs")
    add("--plot", default="logs/speedup.png", help="PNG to write")
    args = parser.parse_args()
    groups = compare(read_runs(args.files, args.since))
    for title, rows in groups.items():
        print(f"\n{title}")
        print_table(rows)
    draw(groups, args.plot)
    print(f"\nPlot saved to {Path(args.plot).absolute()}")


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends it in silence
    main()
