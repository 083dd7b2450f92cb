"""Monitor of GPU utilisation, memory and power: a CSV file with a sample per second.

    python monitor_gpus.py logs/utilisation-JOB.csv PID

It stops when the process PID ends; the run scripts pass the PID of their shell. The
columns are the time in seconds and those of nvidia-smi, amd-smi or, before ROCm 10,
rocm-smi.
Without a GPU it samples the utilisation of this job's CPU cores.
"""

import argparse
import os
import re
import subprocess
import time
from pathlib import Path

from common.errors import run

NVIDIA = ["nvidia-smi", "--format=csv"]
NVIDIA += ["--query-gpu=index,utilization.gpu,memory.used,power.draw"]
AMD = ["amd-smi", "metric", "--csv", "--usage", "--mem-usage", "--power"]
OLD_AMD = ["rocm-smi", "--csv", "--showuse", "--showmeminfo", "vram", "--showpower"]
QUERY_TIMEOUT = 10  # seconds


def query(command):
    """Return the CSV lines that a command prints, or [] if it prints none."""
    how = {"capture_output": True, "text": True, "timeout": QUERY_TIMEOUT}
    try:
        done = subprocess.run(command, **how)
    except (OSError, subprocess.TimeoutExpired):  # it is not installed, or hangs
        return []
    lines = done.stdout.strip().splitlines()
    while lines and not re.search("utilization|gfx_activity|GPU use", lines[0]):
        del lines[0]  # a warning or an error message
    return lines


def find_command():
    """Return the command that samples this job's GPUs, or None without GPUs."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "all")
    if visible in ("", "-1"):
        return None
    # AMD's tools number all GPUs of the node, as Slurm does.
    node_ids = os.environ.get("SLURM_JOB_GPUS", visible).split(",")
    commands = [[*NVIDIA, f"--id={visible}"], [*AMD, "--gpu", *node_ids]]
    commands += [[*OLD_AMD, "--device", *node_ids]]
    commands += [NVIDIA, AMD, OLD_AMD]  # for unknown IDs, such as "all"
    return next((command for command in commands if query(command)), None)


def read_cpu_ticks():
    """Return the (busy, total) ticks of this job's CPU cores since boot."""
    allowed = {f"cpu{cpu}" for cpu in os.sched_getaffinity(0)}
    busy = total = 0
    for line in Path("/proc/stat").read_text().splitlines():
        name, *ticks = line.split()
        if name in allowed:
            ticks = [int(tick) for tick in ticks[:8]]
            total += sum(ticks)
            busy += sum(ticks) - ticks[3] - ticks[4]  # without idle and iowait
    return busy, total


def query_cpus():
    """Return CSV lines with the utilisation of this job's CPU cores in 1 s."""
    busy, total = read_cpu_ticks()
    time.sleep(1)
    new_busy, new_total = read_cpu_ticks()
    percent = 100 * (new_busy - busy) / max(1, new_total - total)
    return ["device, utilization [%]", f"CPU, {percent:.1f}"]


def is_running(pid):
    """Return whether a process is running; a zombie is not."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes() != b""  # empty for a zombie
    except OSError:
        return False


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path, help="CSV file to write")
    parser.add_argument("pid", type=int, help="ID of the process to monitor")
    args = parser.parse_args()
    command = find_command()
    try:
        args.file.parent.mkdir(exist_ok=True)
        out = args.file.open("w", buffering=1)  # by line
    except OSError:
        return  # the training script reports it
    header = ""
    while is_running(args.pid):
        start = time.time()
        lines = query(command) if command else query_cpus()
        if lines and not header:
            header = lines[0]
            print(f"time, {header}", file=out)
        for line in lines[1:]:
            print(f"{start:.2f}, {line}", file=out)
        time.sleep(max(0, start + 1 - time.time()))


if __name__ == "__main__":
    run(main)
