"""Compares runs: a table with speed-up and efficiency, and a plot.

    cd exercise8
    python ../bench/compare.py logs/results.jsonl [MORE.jsonl ...]
    python ../bench/compare.py logs/results.jsonl --since 14:30
    python ../bench/compare.py anna/results.jsonl ben/results.jsonl
    python ../bench/compare.py handed-in/* --html class.html

A script and its twins stand together. An option in which runs differ is a column.

runs          of the same command: the row shows the middle one (of two the slower),
              spread how much faster the fastest was than the slowest
speed-up      against the fastest row of a script for one GPU with the same options,
              but for --epochs, --lr, --seed, --optimizer and the like, and with the
              batch in the column "against"; none without such a run
efficiency    the speed-up for each GPU
training      seconds for --epochs epochs, with validation
accuracy      what the script's last line on it says: of the test, or the validation
memory        the most that rank 0 had: of the tensors on its GPU, or without a GPU
              of the whole process
who           of several files: whose the runs are, by the name of a file or a folder
note          why nothing can be held against a row, or what is odd about it

"8 share 2" says that 8 processes shared 2 CPU cores. Runs on different machines are
never held against each other: they have tables of their own. For a fresh start use
--since, or delete the file.
"""

import json
import math
import re
import signal
from collections import defaultdict
from datetime import date, datetime
from pathlib import Path

from compare_html import find_people, write_page
from compare_read import find_files, read_runs

from common.cli import OptionParser, UserError
from pairs import PAIRS

# Runs that differ in these options alone are held against each other.
FREE = {"epochs", "finetune_epochs", "batch_size", "test_batch_size", "lr", "gamma"}
FREE |= {"seed", "optimizer", "scheduler", "log_interval", "save_model", "resume"}
FREE |= {"profile", "steps", "gpu"}  # what is profiled is in the first epoch
# Runs that are alike in these are repeats.
KEY = "script", "gpus", "nodes", "machine", "device", "batch_per_gpu", "batch"
KEY += "size", "options", "version"
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
SOMETIMES = {"against": "{against}", "device": "{device}", "version": "{version}"}
SOMETIMES |= {"runs": "{runs}", "spread": "{spread:.0%}", "who": "{who}"}
SOMETIMES["ends"] = "{ends}"
HEADERS = {"version": "{framework}", "ends": "slowest to fastest"}
OF_CLASS = "runs", "spread", "who", "ends"  # if several handed in, even if all alike

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


def summarise(runs):
    """Return runs of one command as one: the middle one, with runs and spread."""
    runs = sorted(runs, key=lambda run: run["speed"])
    row, slow, fast = runs[(len(runs) - 1) // 2], runs[0], runs[-1]
    row = row | {"runs": len(runs), "speeds": [run["speed"] for run in runs]}
    row["spread"], row["notes"] = fast["speed"] / slow["speed"] - 1, []
    people, notes = sorted({run["who"] for run in runs}), defaultdict(list)
    row["who"] = ", ".join(people) if len(people) < 4 else f"{len(people)} people"
    row["ends"] = f"{slow['who']} to {fast['who']}" if len(people) > 1 else ""
    for run in runs:
        for note in run["notes"]:
            notes[note].append(run["who"])
    for note, of in notes.items():
        some = of[0] and len(of) < len(runs)
        row["notes"] += [f"{', '.join(sorted({*of}))}: {note}" if some else note]
    return row


def typed(name):
    return "--" + name.replace("_", "-")


def fixed(run):
    """Return the options that must be alike in runs held against each other."""
    options = run["options"].items()
    return {k: v for k, v in options if k not in FREE and v is not None}


def is_base(row):
    return row["gpus"] == 1 and row["script"] not in MANY


def find_base(row, bases):
    """Return the row that a row is held against, or None, and by which batch."""
    alike = [base for base in bases if base["fixed"] == row["fixed"]]
    alike.sort(key=lambda base: base["version"] != row["version"])
    ways = [("batch_per_gpu", "per GPU"), ("batch", "in all")]
    for batch, how in reversed(ways) if row["script"] in STRONG else ways:
        for base in alike:  # the fastest first
            if base["batch"] == row[batch]:
                return base, f"{row[batch]} {how}"
    return None, ""


def why_alone(row, bases):
    """Return in words why a row can be held against none of all the bases."""
    whys, mine = [f"no run of {row['group'][0]}.py on one GPU"], row["fixed"]
    whys += ["on one GPU only on another machine"]
    whys += ["on one GPU only with other data, or another number of --steps"]
    for part, why in enumerate(whys):
        bases = [base for base in bases if base["group"][part] == row["group"][part]]
        if not bases:
            return why
    differ = [
        [typed(name) for name in mine | other if mine.get(name) != other.get(name)]
        for other in (base["fixed"] for base in bases)
    ]
    if names := min(differ, key=len):
        return f"on one GPU only with another {', '.join(names)}"
    batches = dict.fromkeys([row["batch_per_gpu"], row["batch"]])
    return f"none on one GPU with batch {' or '.join(map(str, batches))}"


def find_notes(row, bases, machines):
    """Return in words why a row cannot be compared, or only with care."""
    base, notes = row["base"], [*row["notes"]]
    if len(machines) > 1 and row["nameless"]:
        notes += ["no CPU named (an older version): held against its own file alone"]
    if not base:
        return [*notes, f"no speed-up: {why_alone(row, bases)}"]
    if base["version"] != row["version"]:
        of = [f"{r['framework']} {r['version'] or 'not named'}" for r in (row, base)]
        notes += [", held against ".join(of)]
    if base["cpu"] != row["cpu"] and base["cpu"] and row["cpu"]:
        notes += [f"held against a run beside another CPU, {base['cpu']}"]
    if (base["epochs"] == 1) != (row["epochs"] == 1):
        epochs = f"epochs: {row['epochs']}, held against {base['epochs']}"
        notes += [f"{epochs}: the first, which is slow, counts only if alone"]
    return notes


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
    which runs under this title are not alike, as they are typed, and its own values;
    and notes: in words, why there is no base, and what else is odd.
    """
    same, groups, titled = defaultdict(list), defaultdict(list), {}
    for run in runs:
        same[json.dumps([run[name] for name in KEY])].append(run)
    for row in map(summarise, same.values()):
        script, size = PLAIN.get(row["script"], row["script"]), ""
        if "steps" not in row["options"]:  # else an epoch has what N GPUs do in them
            size = f", {row['size']} {row['counts']} an epoch"
        row["group"], row["fixed"] = (script, row["machine"], size), fixed(row)
        groups[row["group"]].append(row)
    everyone = [row for rows in groups.values() for row in rows]
    machines = [*dict.fromkeys(row["machine"] for row in everyone)]
    bases = [row for row in everyone if is_base(row)]
    where = "machine" if len(machines) > 1 or everyone[0]["who"] else "where"
    for group in sorted(groups, key=lambda group: machines.index(group[1])):
        rows = sorted(groups[group], key=lambda row: (row["gpus"], -row["speed"]))
        differs, alike = find_differences(rows)
        here = [row for row in rows if is_base(row)]
        for row in rows:
            row["base"], row["against"] = base, _ = find_base(row, here)
            own = {typed(name): row["options"].get(name) for name in differs}
            row["differs"] = {k: "" if v is None else v for k, v in own.items()}
            row["speedup"] = row["speed"] / base["speed"] if base else None
            row["efficiency"] = row["speedup"] / row["gpus"] if base else None
            row["notes"] = find_notes(row, bases, machines)
        title = f"{group[0]}.py{alike}  # {rows[0][where]}{group[2]}"
        titled[title] = rows  # it can be typed
    return titled


def tabulate(rows):
    """Return a table's lines of cells, the header first, and the notes below it."""
    columns, notes = dict(COLUMNS), {}
    for name, form in SOMETIMES.items():
        shown = {row[name] for row in rows}
        of_class = rows[0]["who"] and name in OF_CLASS and not shown <= {"", 0, 1}
        if len(shown) > 1 or of_class:
            columns[HEADERS.get(name, name)] = form
    lines = [[*(name.format(**rows[0]) for name in columns), *rows[0]["differs"]]]
    for row in rows:
        numbers = {n: math.nan if v is None else v for n, v in row.items()}
        cells = [form.format(**numbers) for form in columns.values()]
        cells += [str(value) for value in row["differs"].values()]
        lines.append(["" if re.match(r"nan\b", cell) else cell for cell in cells])
        for note in row["notes"]:
            notes.setdefault(note, str(len(notes) + 1))
    if notes:
        lines[0].append("note")
        for line, row in zip(lines[1:], rows, strict=True):
            line.append(" ".join(notes[note] for note in row["notes"]))
    return lines, notes


def print_table(rows):
    lines, notes = tabulate(rows)
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        print("  ".join(c.rjust(w) for c, w in zip(line, widths, strict=True)))
    for note, number in notes.items():
        print(f"  {number}: {note}")


def plot(groups):
    """Return a figure of the speed-up over the GPUs, a line each, and of the ideal.

    Of runs that were repeated each is a dot.
    """
    from matplotlib.figure import Figure

    axes, lines = Figure(figsize=(7, 5)).add_subplot(), defaultdict(list)
    for title, rows in groups.items():
        versions = len({row["version"] for row in rows})
        for row in [row for row in rows if row["base"] and row["gpus"] > 1]:
            nodes = f", {row['nodes']} nodes" * (row["nodes"] > 1)
            options = [f" {k} {v}" for k, v in row["differs"].items() if v != ""]
            options += [f", {row['framework']} {row['version']}"] * (versions > 1)
            name = f"{row['script']}{nodes}, batch {row['against']}"
            lines[title, name + "".join(options)].append(row)
    for (title, name), line in lines.items():
        xs, ys = ([row[key] for row in line] for key in ("gpus", "speedup"))
        label = f"{name}: "
        label += ", ".join(f"{y:.2f} on {x}" for x, y in zip(xs, ys, strict=True))
        label += f"\n{title}" * (len(groups) > 1)
        label = label.replace("$", r"\$")  # else it begins a formula
        (drawn,) = axes.plot([1, *xs], [1, *ys], "o-", label=label)
        for row in line:
            repeats = [speed / row["base"]["speed"] for speed in row["speeds"]]
            dots, colour = [row["gpus"]] * len(repeats), drawn.get_color()
            axes.scatter(dots, repeats, 9, color=colour, alpha=0.4)
    ends = [1, max(row["gpus"] for rows in groups.values() for row in rows)]
    axes.plot(ends, ends, "--", color="gray", label="ideal")
    axes.set(xlabel="GPUs, or CPU cores in their place", ylabel="speed-up")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.legend(fontsize="small", loc="upper left", bbox_to_anchor=(0, -0.12))
    return axes.figure


def draw(groups, file):
    save(plot(groups), file)


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
    add("files", nargs="+", metavar="RESULTS.jsonl", help="of runs, or folders")
    add("--since", type=moment, help="14:30, or 2026-11-21; default: all runs")
    add("--plot", default="logs/speedup.png", help="PNG to write")
    add("--html", metavar="FILE", help="page with all this to write; default: none")
    args = parser.parse_args()
    files, left_out = find_files(args.files), []
    runs = read_runs(files, args.since, left_out)
    groups = compare(runs)
    for title, rows in groups.items():
        print(f"\n{title}")
        print_table(rows)
    draw(groups, args.plot)
    print(f"\nPlot saved to {Path(args.plot).absolute()}")
    if args.html:
        sections = []
        for machine in dict.fromkeys(rows[0]["machine"] for rows in groups.values()):
            here = {t: r for t, r in groups.items() if r[0]["machine"] == machine}
            tables = {title: tabulate(rows) for title, rows in here.items()}
            sections.append((machine, tables, plot(here)))
        write_page(args.html, sections, find_people(files, runs), left_out)
        print(f"Page saved to {Path(args.html).absolute()}")


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends it in silence
    main()
