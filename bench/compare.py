"""Compares runs: a table with speed-up and efficiency, and a plot.

    cd exercise8
    python ../bench/compare.py logs/results.jsonl [MORE.jsonl ...]
    python ../bench/compare.py anna/results.jsonl ben/results.jsonl

An option in which runs differ is a column.

speed-up      against the fastest run of a script for one GPU with the same options,
              but for --epochs, --lr, --seed, --optimizer and the like, and with the
              batch in the column "against"; one with the same --epochs if there is
              one, and none without such a run
efficiency    the speed-up for each GPU
training      seconds for --epochs epochs, with validation
accuracy      of the test or the validation, as the script prints it last
memory        the most that rank 0 had: of the tensors on its GPU, or without a GPU
              of the whole process
runs          of the same command: the row shows the middle one (of two the slower),
              spread how much faster the fastest was than the slowest
who           of several files: whose the runs are, by the name of a file or a folder
note          why there is no baseline, or what is unusual about the runs

Runs with --verbose are left out: they print in each step.

"8 share 2" says that 8 processes shared 2 CPU cores. Runs on different machines are
never compared with each other: they have tables of their own.
"""

import json
import signal
from collections import defaultdict
from pathlib import Path

from results import find_files, printable, read_runs

from common.cli import OptionParser, UserError
from pairs import PAIRS

# Runs that differ in these alone can be compared: --profile is of the first epoch.
IGNORED_OPTIONS = {"epochs", "finetune_epochs", "lr", "gamma", "optimizer", "seed"}
IGNORED_OPTIONS |= {"batch_size", "test_batch_size", "scheduler", "log_interval"}
IGNORED_OPTIONS |= {"save_model", "resume", "steps", "gpu", "profile"}
# Runs that are the same in these fields are repeats of one command.
REPEATED = ["script", "gpus", "nodes", "machine", "device", "batch_per_gpu", "batch"]
REPEATED += ["size", "options", "version"]
# Header: field of a row, format
COLUMNS = {
    "script": ("script", "{}"),
    "GPUs": ("gpus", "{}"),
    "nodes": ("nodes", "{}"),
    "per GPU": ("batch_per_gpu", "{}"),
    "batch": ("batch", "{}"),
    "s/epoch": ("seconds_per_epoch", "{:.2f}"),
    "{counts}/s": ("speed", "{:.1f}"),
    "speed-up": ("speedup", "{:.2f}"),
    "efficiency": ("efficiency", "{:.0%}"),
    "training": ("training_seconds", "{:.1f} s"),
    "accuracy": ("accuracy", "{:.2f} %"),
    "memory": ("peak_memory_gb", "{:.2f} GB"),
}
# Shown if rows differ in them, or if they say something of repeats, or have notes.
OPTIONAL_COLUMNS = {
    "against": ("against", "{}"),
    "device": ("device", "{}"),
    "runs": ("runs", "{}"),
    "spread": ("spread", "{:.0%}"),
    "who": ("who", "{}"),
    "note": ("note", "{}"),
}

# Repeats spread by more, or more efficiency than this: the machine was busy.
MAX_SPREAD = 0.25
MAX_EFFICIENCY = 1.05

# Each script's counterpart for one GPU, which scripts are for several, and which of
# them always use AMP. One of these is in no pair: it writes its training step out.
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
    """Return the script for one GPU with which a row is compared.

    That of a student's own script is the one of rows with the same options: a copy
    that was changed has these.
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
    """Return the runs of one command as a row: the middle one, and what all were."""
    runs = sorted(runs, key=lambda run: run["speed"])
    people = sorted({run["who"] for run in runs})
    row = runs[(len(runs) - 1) // 2].copy()
    row["runs"] = len(runs)
    row["spread"] = runs[-1]["speed"] / runs[0]["speed"] - 1
    row["who"] = ", ".join(people) if len(people) < 4 else f"{len(people)} people"
    row["notes"] = [note for run in runs for note in run["notes"]]
    if row["spread"] > MAX_SPREAD:
        text = f"spread {row['spread']:.0%}, so the machine was busy"
        row["notes"].append(f"{text}: repeat {name_row(row)}")
    if row["epochs"] == 1:
        row["notes"].append("one epoch: the first, which is slow")
    # What its runs can differ in, under the names of the columns.
    row["settings"] = {flag(name): value for name, value in row["options"].items()}
    row["settings"] |= {"CPU": row["cpu"], row["framework"]: row["version"]}
    return row


def name_row(row):
    """Return what a row ran on what, in the words in which its runs begin."""
    return f"{row['script']} on {row['gpus']} x {row['where']}"


def flag(name):
    """Return an option as it is typed."""
    return "--" + name.replace("_", "-")


def comparable_options(run):
    """Return the options that must be the same in runs that are compared."""
    options = run["options"].items()
    return {k: v for k, v in options if k not in IGNORED_OPTIONS and v is not None}


def lacks_amp(base, row):
    """Return whether a row's speed-up over this base would be that of AMP, too."""
    return row["gpus"] > 1 and row["script"] in AMP and base["script"] not in AMP


def rank_base(base, row):
    """Return a key to sort bases by: the one that suits a row best comes first."""
    epochs = base["epochs"] != row["epochs"], base["epochs"] == 1
    return lacks_amp(base, row), base["version"] != row["version"], *epochs


def find_baseline(row, bases):
    """Return which base a row is compared with, or None, and by which batch."""
    batches = [(row["batch_per_gpu"], "per GPU"), (row["batch"], "in all")]
    if row["script"] in STRONG:
        batches.reverse()
    options = comparable_options(row)
    bases = [base for base in bases if comparable_options(base) == options]
    bases.sort(key=lambda base: rank_base(base, row))  # of equals the fastest
    for batch, kind in batches:
        for base in bases:
            if base["batch"] == batch:
                return base, f"{batch} {kind}"
    return None, ""


def explain_no_baseline(row, bases):
    """Return in words why a row can be compared with none of these."""
    if not bases:
        return "no run on one GPU of this machine with these data"
    mine, differing = comparable_options(row), []
    for base in bases:
        its = comparable_options(base)
        names = [name for name in mine | its if mine.get(name) != its.get(name)]
        differing.append(", ".join(map(flag, names)))
    if all(differing):
        return f"on one GPU only with another {min(differing, key=len)}"
    return f"none on one GPU with batch {row['batch_per_gpu']} or {row['batch']}"


def add_speedup(row, bases):
    """Give a row its base, the one of these that it is compared with, and notes."""
    base, row["against"] = find_baseline(row, bases)
    row["base"], row["speedup"], row["efficiency"] = base, None, None
    if base is None:
        row["notes"].append(f"no speed-up: {explain_no_baseline(row, bases)}")
        return
    row["speedup"] = row["speed"] / base["speed"]
    row["efficiency"] = row["speedup"] / row["gpus"]
    reasons = []
    if lacks_amp(base, row):
        reasons.append(f"compared with {base['script']}, which has no AMP")
    if base["version"] != row["version"]:
        reasons.append(f"compared with {base['framework']} {base['version']}")
    if base["epochs"] == 1 < row["epochs"]:
        reasons.append("compared with one epoch: the first, which is slow")
    if row["efficiency"] > MAX_EFFICIENCY and not reasons:
        text = f"efficiency {row['efficiency']:.0%}, so the machine was busy"
        reasons.append(f"{text}: repeat {name_row(base)} and {name_row(row)}")
    row["notes"] += reasons


def find_differences(rows):
    """Return which settings differ between rows, and the other options, as typed."""
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
    """Return {title: rows}: runs that can be compared, the fewest GPUs first.

    Runs of one command are one row. base: the row that it is compared with, or None;
    differs: {column: value} of what rows of this title differ in; notes: in words,
    why there is no base, or what is unusual.
    """
    repeats, groups, titled = defaultdict(list), defaultdict(list), {}
    for run in runs:
        repeats[json.dumps([run[name] for name in REPEATED])].append(run)
    summaries = [summarise(rows) for rows in repeats.values()]
    for row in summaries:
        script, size = find_single(row, summaries), ""
        if "steps" not in row["options"]:  # else an epoch has what N GPUs do in them
            size = f", {row['size']} {row['counts']} an epoch"
        groups[row["machine"], script, size].append(row)
    machines = {machine for machine, *_ in groups}
    for (machine, script, size), rows in sorted(groups.items()):
        rows.sort(key=lambda row: (row["gpus"], -row["speed"]))
        bases = [r for r in rows if r["gpus"] == 1 and r["script"] not in MULTI_GPU]
        if script in SINGLE:  # its own, not a student's
            bases = [r for r in bases if find_single(r, []) == script]
        differing, options = find_differences(rows)
        for row in rows:
            add_speedup(row, bases)
            values = {name: row["settings"].get(name) for name in differing}
            row["differs"] = {k: "" if v is None else v for k, v in values.items()}
        where = machine if len(machines) > 1 or rows[0]["who"] else rows[0]["where"]
        title = f"{script}.py{options}  # {where}{size}"  # it can be typed
        titled[printable(title)] = rows
    return titled


def print_table(rows):
    """Print a line for each row, and below the table the notes on them."""
    notes = list(dict.fromkeys(note for row in rows for note in row["notes"]))
    for row in rows:
        numbers = [
            i for i, note in enumerate(notes, start=1) if note in row["notes"]
        ]
        row["note"] = " ".join(map(str, numbers))
    columns = dict(COLUMNS)
    for header, (name, form) in OPTIONAL_COLUMNS.items():
        differ = len({row[name] for row in rows}) > 1
        said = name not in ("against", "device") and rows[0][name] not in ("", 0, 1)
        if differ or said:
            columns[header] = name, form
    header = [text.format(**rows[0]) for text in columns]
    lines = [[*header, *rows[0]["differs"]]]
    for row in rows:
        cells = []
        for name, form in columns.values():
            cells.append("" if row[name] is None else form.format(row[name]))
        lines.append([*cells, *map(str, row["differs"].values())])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        print(printable("  ".join(map(str.rjust, line, widths))))
    for number, note in enumerate(notes, start=1):
        print(printable(f"  {number}: {note}"))


def plot(groups):
    """Return a figure of the speed-up over the GPUs, and of the ideal."""
    from matplotlib.figure import Figure

    axes, lines, most = Figure(figsize=(7, 5)).add_subplot(), defaultdict(list), 1
    for title, rows in groups.items():
        most = max(most, rows[-1]["gpus"])
        for row in rows:
            if row["gpus"] == 1 or not row["base"]:
                continue
            name = row["script"]
            if row["nodes"] > 1:
                name += f", {row['nodes']} nodes"
            settings = [f" {k} {v}" for k, v in row["differs"].items() if v != ""]
            name += f", batch {row['against']}{''.join(settings)}"
            lines[title, printable(name)].append(row)
    for (title, name), rows in lines.items():
        points = [(row["gpus"], row["speedup"]) for row in rows]
        label = f"{name}: " + ", ".join(f"{y:.2f} on {x}" for x, y in points)
        if len(groups) > 1:
            label += f"\n{title}"
        label = label.replace("$", r"\$")  # else it begins a formula
        axes.plot(*zip((1, 1), *points, strict=True), "o-", label=label)
    axes.plot([1, most], [1, most], "--", color="gray", label="ideal")
    axes.set(xlabel="GPUs, or CPU cores in their place", ylabel="speed-up")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.legend(fontsize="small", loc="upper left", bbox_to_anchor=(0, -0.12))
    return axes.figure


def save(figure, file):
    """Write a plot to this file, or raise UserError."""
    try:
        Path(file).parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(file, dpi=120, bbox_inches="tight")
    except (OSError, ValueError) as error:  # an ending that matplotlib does not know
        raise UserError(f"cannot write {file}: {error}") from None


def main():
    parser = OptionParser(__doc__)
    add = parser.add_argument
    add("files", nargs="+", metavar="RESULTS.jsonl", help="files or folders of runs")
    add("--plot", default="logs/speedup.png", help="PNG to write")
    args = parser.parse_args()
    groups = compare(read_runs(find_files(args.files)))
    for title, rows in groups.items():
        print(f"\n{title}")
        print_table(rows)
    save(plot(groups), args.plot)
    print(f"\nPlot saved to {Path(args.plot).absolute()}")


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends it in silence
    main()
