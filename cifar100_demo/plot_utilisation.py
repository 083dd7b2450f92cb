"""Plot of GPU utilisation, memory and power, as monitor_gpus.py sampled them.

    python plot_utilisation.py [logs/utilisation-JOB.csv] [--to FILE.png]

Without a file name it plots the newest file in logs/.
"""

import argparse
import csv
import json
import os
import re
from pathlib import Path

from matplotlib.figure import Figure

from common.errors import UserError, run

QUANTITIES = {  # by the column titles of nvidia-smi, amd-smi and rocm-smi
    "utilisation in %": re.compile("utilization|gfx_activity|GPU use"),
    "memory in GB": re.compile("memory.used|used_vram|Used Memory"),
    "power in W": re.compile("power.draw|socket_power|Power"),
}
# Factors to GB, by the end of a column's title.
GB = {"[MiB]": 2**20 / 1e9, "used_vram": 2**20 / 1e9, "(B)": 1e-9}
NUMBER = re.compile(r"\d+(\.\d+)?")  # the 97 of "97 %"; no match in "[N/A]"


def read_samples(file):
    """Return {quantity: {device: [(seconds, value)]}}; skip incomplete lines.

    Raises UserError if there are no samples.
    """
    with open(file, newline="") as lines:
        rows = list(csv.reader(lines, skipinitialspace=True))
    samples = {}
    for quantity, pattern in QUANTITIES.items():
        for column, title in enumerate(rows[0] if rows else []):
            if not pattern.search(title):
                continue
            unit = GB.get(title.split()[-1], 1)
            for row in rows:
                complete = len(row) == len(rows[0]) and NUMBER.fullmatch(row[0])
                value = complete and NUMBER.match(row[column])
                if value:
                    device = re.sub(r"^(card)?(?=\d)", "GPU ", row[1])
                    points = samples.setdefault(quantity, {}).setdefault(device, [])
                    points.append((float(row[0]), float(value[0]) * unit))
    if not samples:
        raise UserError(
            f"no samples in {file}; name a file that monitor_gpus.py wrote"
        )
    return samples


def read_runs(job, start, end):
    """Return [(script, epoch ends)] of this job's runs, start <= end time <= end."""
    results, runs = Path("logs/results.jsonl"), []
    for line in results.open() if results.exists() else []:
        run = json.loads(line)
        ends = run["epoch_ends"]
        if start <= ends[-1] <= end and run["slurm_job"] in (None, job):
            runs.append((run["script"], ends))
    return runs


def plot(samples, runs, start, file):
    """Save a PNG with a panel for each quantity, over the seconds since start."""
    figure = Figure(figsize=(11, 1 + 2.4 * len(samples)), layout="constrained")
    panels = figure.subplots(len(samples), sharex=True, squeeze=False)[:, 0]
    ends = [end - start for _, ends in runs for end in ends]
    for axes, (quantity, devices) in zip(panels, samples.items(), strict=True):
        for device, points in sorted(devices.items()):
            seconds, values = zip(*points, strict=True)
            axes.plot([s - start for s in seconds], values, label=device, lw=2)
        axes.set_ylabel(quantity, fontsize=14)
        axes.set_ylim(0, 105 if "%" in quantity else None)
        axes.tick_params(labelsize=13)
        for end in ends:
            axes.axvline(end, color="gray", linestyle=":")
    if ends:
        top = panels[0].secondary_xaxis("top")
        top.set_ticks(ends, [n for _, ends in runs for n in range(1, len(ends) + 1)])
        top.tick_params(labelsize=13)
        top.set_xlabel("end of epoch", fontsize=14)
    figure.suptitle(", ".join(script for script, _ in runs), fontsize=15)
    lines = panels[0].get_legend_handles_labels()
    figure.legend(*lines, loc="outside lower center", ncols=8, fontsize=13)
    panels[-1].set_xlabel("seconds since the start", fontsize=14)
    figure.savefig(file, dpi=110)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "file", nargs="?", type=Path, help="CSV file to read (default: the newest)"
    )
    parser.add_argument(
        "--to", type=Path, default=Path("logs/utilisation.png"), help="PNG to write"
    )
    args = parser.parse_args()
    files = list(Path("logs").glob("utilisation-*.csv"))
    if not files and not args.file:
        raise UserError("no logs/utilisation-*.csv; run `bash run_single_cifar.sh`")
    file = args.file or max(files, key=os.path.getmtime)
    samples = read_samples(file)
    series = [points for devices in samples.values() for points in devices.values()]
    times = [seconds for points in series for seconds, _ in points]
    job = file.stem.removeprefix("utilisation-")
    # The last epoch may end after the last sample: allow two seconds.
    runs = read_runs(job, min(times), max(times) + 2)
    args.to.parent.mkdir(parents=True, exist_ok=True)
    plot(samples, runs, min(times), args.to)
    print(f"Plot of {file} saved to {args.to}")


if __name__ == "__main__":
    run(main)
