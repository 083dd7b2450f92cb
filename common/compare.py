"""Compares runs: a table with speed-up and efficiency, and a plot.

    python -m common.compare logs/results.jsonl [MORE.jsonl ...] [--plot FILE.png]

A script and its twins stand together, each run against the one on the fewest GPUs.
"""

import json
from collections import defaultdict
from pathlib import Path

from common.cli import OptionParser, UserError
from common.pairs import PAIRS

# Runs that differ in these options alone are still compared.
FREE = {"epochs", "finetune_epochs", "batch_size", "test_batch_size", "lr", "gamma"}
FREE |= {"seed", "optimizer", "scheduler", "log_interval", "save_model", "workers"}
FREE |= {"profile", "steps", "gpu", "resume", "fp16", "verbose"}
COLUMNS = {
    "script": "{script}",
    "GPUs": "{gpus}",
    "device": "{device}",
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


def read_runs(files):
    """Return the runs in these .jsonl files, a dict each, or raise UserError."""
    try:
        texts = [Path(file).read_text() for file in files]
        runs = [json.loads(line) for text in texts for line in text.splitlines()]
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read the results: {error}") from None
    if not runs:
        raise UserError(f"no results in {', '.join(files)}: run a script first")
    return runs


def compare(runs):
    """Return {title: runs}: those that can be compared, the fewest GPUs first.

    Each gets its speed, in images/s or what it counts; its speedup, against the
    smallest run (the fastest such); and its efficiency, the speedup for each GPU.
    """
    plain, groups = {}, defaultdict(list)
    for left, right, tag, _ in PAIRS:
        if tag != "DATA":
            plain[Path(right).stem] = plain.get(Path(left).stem, Path(left).stem)
    plain["multi_worker_mirrored"] = "single"  # no pair: it writes its step out
    for run in runs:
        run["counts"] = counts = run.get("counts", "images")
        run["speed"] = run[f"{counts}_per_second"]
    for run in sorted(runs, key=lambda run: (run["gpus"], -run["speed"])):
        options = [f"--{k} {v}" for k, v in run["options"].items() if k not in FREE]
        script = plain.get(run["script"], run["script"])
        title = " ".join([f"{script}.py", *options])
        if "steps" not in run["options"]:  # else an epoch has what N GPUs do in them
            number = run[f"{run['counts']}_per_epoch"]
            title += f", {number} {run['counts']} an epoch"
        title += f", {run['device']}"
        base = groups[title][0] if groups[title] else run
        speedup = run["speed"] / base["speed"]
        efficiency = speedup * base["gpus"] / run["gpus"]
        groups[title].append(run | {"speedup": speedup, "efficiency": efficiency})
    return groups


def print_table(rows):
    cells = [[name.format(**rows[0]) for name in COLUMNS]]
    cells += [[form.format(**row) for form in COLUMNS.values()] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for line in cells:
        print("  ".join(c.rjust(w) for c, w in zip(line, widths, strict=True)))


def draw(groups, file):
    """Save a PNG of the speed-up over the GPUs, and of the ideal."""
    from matplotlib.figure import Figure

    axes = Figure(figsize=(7, 5)).add_subplot()
    for title, rows in groups.items():
        x, y = [row["gpus"] for row in rows], [row["speedup"] for row in rows]
        axes.plot(x, y, "o-", label=title.replace(", ", "\n", 1))
        for point in zip(x, y, strict=True):
            axes.annotate(f"{point[1]:.2f} ", point, va="bottom", ha="right")
    ends = [1, max(row["gpus"] for rows in groups.values() for row in rows)]
    axes.plot(ends, ends, "--", color="gray", label="ideal")
    axes.set(xlabel="GPUs, or CPU cores in their place", ylabel="speed-up")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.legend(fontsize="small", loc="upper left", bbox_to_anchor=(0, -0.12))
    axes.figure.savefig(file, dpi=120, bbox_inches="tight")


def main():
    parser = OptionParser(__doc__)
    parser.add_argument("files", nargs="+", metavar="RESULTS.jsonl", help="of runs")
    parser.add_argument("--plot", default="logs/speedup.png", help="PNG to write")
    args = parser.parse_args()
    groups = compare(read_runs(args.files))
    for title, rows in groups.items():
        print(f"\n{title}")
        print_table(rows)
    draw(groups, args.plot)
    print(f"\nPlot saved to {Path(args.plot).absolute()}")


if __name__ == "__main__":
    main()
