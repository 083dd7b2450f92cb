"""Draws how busy the GPUs were over the epochs of a run, from what monitor.py wrote.

    python plot_utilisation.py [logs/utilisation-JOB.csv] [--to FILE.png]

Without a file's name it takes the newest one in logs/.
"""

import csv
import json
from collections import defaultdict
from pathlib import Path

from matplotlib.figure import Figure

from common.cli import OptionParser, UserError

PANELS = {
    "utilisation_percent": "utilisation in %",
    "memory_gb": "memory in GB",
    "power_w": "power in W",
}


def read_samples(file):
    """Return {device: its rows, dicts of numbers or None}, or raise UserError."""
    devices = defaultdict(list)
    try:
        with open(file, newline="") as lines:
            for row in csv.DictReader(lines):
                device = row.pop("device")
                numbers = {k: float(v) if v else None for k, v in row.items()}
                devices[device].append(numbers)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"cannot read {file}: {error}") from None
    if not devices:
        raise UserError(f"no samples in {file}: it takes a run of some seconds")
    return devices


def read_runs(start, end, file):
    """Return the runs that ended in between, but for those of other jobs."""
    results = Path("logs/results.jsonl")
    runs = map(json.loads, results.open()) if results.exists() else []
    jobs = None, file.stem.removeprefix("utilisation-")
    return [
        run
        for run in runs
        if start <= run["epoch_ends"][-1] <= end and run["slurm_job"] in jobs
    ]


def draw(devices, runs, file):
    """Save a PNG with a panel for each quantity that was measured."""
    times = [row["time"] for rows in devices.values() for row in rows]
    panels = [
        key
        for key in PANELS
        if any(row[key] is not None for rows in devices.values() for row in rows)
    ]
    figure = Figure(figsize=(11, 1 + 2.4 * len(panels)), layout="constrained")
    subplots = figure.subplots(len(panels), sharex=True, squeeze=False)[:, 0]
    epochs = [pair for run in runs for pair in enumerate(run["epoch_ends"], start=1)]
    ends = [end - min(times) for _, end in epochs]
    for axes, key in zip(subplots, panels, strict=True):
        for device, rows in sorted(devices.items()):
            seconds = [row["time"] - min(times) for row in rows]
            axes.plot(seconds, [row[key] for row in rows], label=device, lw=2)
        axes.set_ylabel(PANELS[key], fontsize=14)
        axes.set_ylim(0, 105 if key == "utilisation_percent" else None)
        axes.tick_params(labelsize=13)
        for end in ends:
            axes.axvline(end, color="gray", linestyle=":")
    if epochs:
        top = subplots[0].secondary_xaxis("top")
        top.set_ticks(ends, [epoch for epoch, _ in epochs])
        top.tick_params(labelsize=13)
        top.set_xlabel("end of epoch", fontsize=14)
    figure.suptitle(", ".join(run["script"] for run in runs), fontsize=15)
    lines = subplots[0].get_legend_handles_labels()
    figure.legend(*lines, loc="outside lower center", ncols=8, fontsize=13)
    subplots[-1].set_xlabel("seconds since the start", fontsize=14)
    figure.savefig(file, dpi=110)


def main():
    parser = OptionParser(__doc__)
    add = parser.add_argument
    add(
        "file",
        nargs="?",
        type=Path,
        help="CSV to read; default: the newest in logs/",
    )
    add("--to", type=Path, default=Path("logs/utilisation.png"), help="PNG to write")
    args = parser.parse_args()
    files = [args.file] if args.file else Path("logs").glob("utilisation-*.csv")
    files = sorted(files, key=lambda file: args.file or file.stat().st_mtime)
    if not files:
        raise UserError(
            "no logs/utilisation-*.csv yet: type `bash run_single_cifar.sh` first"
        )
    devices = read_samples(files[-1])
    times = [row["time"] for rows in devices.values() for row in rows]
    # A run's last epoch ends a moment before the monitor does.
    runs = read_runs(min(times), max(times) + 2, files[-1])
    args.to.parent.mkdir(parents=True, exist_ok=True)
    draw(devices, runs, args.to)
    print(f"Plot of {files[-1]} saved to {args.to}")


if __name__ == "__main__":
    main()
