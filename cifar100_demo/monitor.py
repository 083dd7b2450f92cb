"""Writes each second how busy the GPUs are, until it is ended; run scripts start it.

    python monitor.py logs/utilisation-JOB.csv

It asks nvidia-smi, amd-smi or rocm-smi, whichever is there and answers. Without a
GPU it asks the system how busy the CPUs are that this process may use.
"""

import csv
import os
import re
import subprocess
import time
from pathlib import Path

from common.cli import OptionParser


def first_set(*names):
    return next((os.environ[name] for name in names if name in os.environ), None)


# The GPUs that this job may use: the tools show more, unless the others are hidden.
# AMD's never hide any, and count as Slurm does in the first two.
NVIDIA = first_set("CUDA_VISIBLE_DEVICES")
AMD = first_set(
    "SLURM_STEP_GPUS",
    "SLURM_JOB_GPUS",
    "ROCR_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "CUDA_VISIBLE_DEVICES",
)
HIDDEN = {"", "-1"} & {NVIDIA, AMD, os.environ.get("HIP_VISIBLE_DEVICES")}
# A command that prints a table, and what stands in the heads of its columns:
# utilisation in %, memory, power in W. Then how many GB one unit of memory is.
TOOLS = [
    (
        "nvidia-smi --format=csv,nounits"
        " --query-gpu=index,utilization.gpu,memory.used,power.draw",
        ("utilization.gpu", "memory.used", "power.draw"),
        2**20 / 1e9,
    ),
    (
        "amd-smi metric --usage --mem-usage --power --csv"
        + (f" --gpu {AMD.replace(',', ' ')}" if AMD else ""),
        ("gfx_activity", "used_vram", "socket_power"),
        2**20 / 1e9,
    ),
    (
        "rocm-smi --showuse --showmeminfo vram --showpower --csv"
        + (f" --device {AMD.replace(',', ' ')}" if AMD else ""),
        ("GPU use", "VRAM Total Used", "Power"),
        1 / 1e9,
    ),
]
HEAD = "time", "device", "utilisation_percent", "memory_gb", "power_w"


def number(text, unit=1.0):
    """Return the number in a text such as "251 W", in our unit, or "" for "N/A"."""
    found = re.search(r"[\d.]+", text or "")
    return round(float(found[0]) * unit, 3) if found else ""


def ask(command, heads, unit):
    """Return (device, utilisation, memory, power) of each GPU that a tool knows."""
    try:
        done = subprocess.run(command.split(), capture_output=True, text=True)
    except OSError:
        return []  # there is no such tool
    lines = done.stdout.splitlines()
    while lines and heads[0] not in lines[0]:  # warnings come before the table
        del lines[0]
    rows = []
    for row in csv.DictReader(lines):
        columns = [next((k for k in row if k and head in k), None) for head in heads]
        use, memory, power = (row.get(column) for column in columns)
        rows.append(
            (
                f"GPU {number(next(iter(row.values()))):.0f}",
                number(use),
                number(memory, unit),
                number(power),
            )
        )
    # nvidia-smi refuses a list with a GPU that is not there, and so shows all.
    chosen = {f"GPU {number}" for number in (NVIDIA or "").split(",")}
    if command.startswith("nvidia-smi") and chosen & {row[0] for row in rows}:
        rows = [row for row in rows if row[0] in chosen]
    return rows


def cpu_times():
    """Return (busy, all) of the time that these CPUs have had, in ticks."""
    mine = {f"cpu{cpu}" for cpu in os.sched_getaffinity(0)}
    lines = [line.split() for line in Path("/proc/stat").read_text().splitlines()]
    ticks = [[int(n) for n in line[1:9]] for line in lines if line[0] in mine]
    every = sum(map(sum, ticks))
    return every - sum(idle + wait for _, _, _, idle, wait, *_ in ticks), every


def ask_cpu(seconds=1):
    """Return the same of these CPUs over the next second; their power is unknown."""
    before = cpu_times()
    time.sleep(seconds)
    busy, every = (b - a for a, b in zip(before, cpu_times(), strict=True))
    memory = dict(re.findall(r"(\w+): +(\d+) kB", Path("/proc/meminfo").read_text()))
    used = (int(memory["MemTotal"]) - int(memory["MemAvailable"])) * 1024 / 1e9
    return [("CPU", round(100 * busy / max(1, every), 1), round(used, 3), "")]


def main():
    parser = OptionParser(__doc__)
    parser.add_argument("file", type=Path, help="CSV to write")
    file = parser.parse_args().file
    tools = [tool for tool in TOOLS if not HIDDEN and ask(*tool)]
    try:
        file.parent.mkdir(exist_ok=True)
        out = file.open("w", newline="")
    except OSError:
        return  # the training says so, too
    with out:
        writer = csv.writer(out)
        writer.writerow(HEAD)
        while True:
            start = time.time()
            rows = ask(*tools[0]) if tools else ask_cpu()
            writer.writerows([round(start, 2), *row] for row in rows)
            out.flush()
            time.sleep(max(0, start + 1 - time.time()))


if __name__ == "__main__":
    main()
