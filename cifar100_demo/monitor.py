"""Writes every second to a CSV file how busy the GPUs are, until a process ends.

    python monitor.py logs/utilisation-JOB.csv PROCESS

The run scripts start it, with their own number. The columns are those of nvidia-smi
or rocm-smi, after the time in seconds. Without a GPU there is one: the use of this
job's CPUs, in %.
"""

import os
import subprocess
import time
from pathlib import Path

from common.cli import OptionParser

NVIDIA = ["nvidia-smi", "--format=csv"]
NVIDIA += ["--query-gpu=index,utilization.gpu,memory.used,power.draw"]
AMD = ["rocm-smi", "--csv", "--showuse", "--showmeminfo", "vram", "--showpower"]


def ask(command):
    """Return the lines of the CSV that a command prints; none if it cannot."""
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError:  # there is no such tool
        return []
    lines = done.stdout.splitlines()
    while lines and "utilization" not in lines[0] and "GPU use" not in lines[0]:
        del lines[0]  # a warning, or why there is no table
    return lines


def find_command():
    """Return the command that lists the GPUs of this job, or None without GPUs."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "all")
    if visible in ("", "-1"):
        return None
    job = os.environ.get("SLURM_JOB_GPUS", visible)  # as rocm-smi counts them
    commands = [[*NVIDIA, f"--id={visible}"], [*AMD, "--device", *job.split(",")]]
    # A tool that refuses these GPUs, such as "all", is asked for those that it sees.
    commands += [NVIDIA, AMD]
    return next((command for command in commands if ask(command)), None)


def cpu_ticks():
    """Return (busy, all) of the time that the CPUs of this job have had."""
    mine = {f"cpu{cpu}" for cpu in os.sched_getaffinity(0)}
    busy = total = 0
    for line in Path("/proc/stat").read_text().splitlines():
        name, *ticks = line.split()
        if name in mine:
            ticks = [int(tick) for tick in ticks[:8]]
            total += sum(ticks)
            busy += sum(ticks) - ticks[3] - ticks[4]  # idle, and waiting for a disk
    return busy, total


def ask_cpus():
    """Return the same kind of lines for the job's CPUs, over the next second."""
    busy, total = cpu_ticks()
    time.sleep(1)
    new_busy, new_total = cpu_ticks()
    percent = 100 * (new_busy - busy) / max(1, new_total - total)
    return ["device, utilization [%]", f"CPU, {percent:.1f}"]


def is_running(process):
    """Return whether a process runs: of one that has ended, no command is left."""
    try:
        return Path(f"/proc/{process}/cmdline").read_bytes() != b""
    except OSError:
        return False


def main():
    parser = OptionParser(__doc__)
    parser.add_argument("file", type=Path, help="CSV to write")
    parser.add_argument("process", type=int, help="number of the one to wait for")
    args = parser.parse_args()
    command = find_command()
    try:
        args.file.parent.mkdir(exist_ok=True)
        out = args.file.open("w", buffering=1)  # each line at once
    except OSError:
        return  # the training script prints why
    header = ""
    while is_running(args.process):
        start = time.time()
        lines = ask(command) if command else ask_cpus()
        if lines and not header:
            header = lines[0]
            print(f"time, {header}", file=out)
        for line in lines[1:]:
            print(f"{start:.2f}, {line}", file=out)
        time.sleep(max(0, start + 1 - time.time()))


if __name__ == "__main__":
    main()
