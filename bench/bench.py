"""Measurements of the training scripts against ceilings and naive versions.

    make bench
    DATADIR=/path/to/data make bench BENCH="--only exercise8 --only cinic_lab"
    cd exercise8 && sbatch --gpus-per-node=2 run.sh ../bench/bench.py

Prints and saves each row in results/ as soon as it is measured, with the results of
check.py. Without data in DATADIR it makes synthetic data, and the rows say so.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from common.data import REPOSITORY, data_dir
from common.errors import UserError, run
from common.synthetic import SYNTHETIC_DIR
from timing import HEAD, format_missed, format_row
from tools.machine import REQUIRED_FILES

BENCH = Path(__file__).resolve().parent
TORCHRUN = [sys.executable, "-m", "common.torchrun", "--standalone"]
# The image files that the naive version of an exercise reads.
IMAGES = {
    "exercise8": ["dogs-vs-cats/train-2000/train"],
    "cinic_lab": ["CINIC/CINIC-10/train"],
}


def result_file():
    """Return the file for this GPU, or for this CPU and its instruction set."""
    if torch.accelerator.device_count():
        name = torch.get_device_module().get_device_name(0)
    else:
        name = getattr(torch.cpu, "get_capabilities", dict)().get("cpu_name", "CPU")
        name += f" {torch.backends.cpu.get_cpu_capability()}"
    return BENCH / f"results/{re.sub('[^A-Za-z0-9]+', '-', name).strip('-')}.json"


def data_for(exercise):
    """Return the DATADIR to use, and whether its data are synthetic; make these."""
    root, needed = data_dir(""), REQUIRED_FILES[exercise]
    names = needed + IMAGES.get(exercise, [])
    lacking = ", ".join(name for name in names if not (root / name).exists())
    if lacking:
        print(f"{exercise} on synthetic data: no {lacking} in {root}", flush=True)
        make = [sys.executable, "sample_data.py"]
        subprocess.run(make, cwd=REPOSITORY / exercise, check=True)
        root = SYNTHETIC_DIR
    return root, bool(needed) and root.resolve() == SYNTHETIC_DIR.resolve()


def launches(*arguments):
    """Yield the commands that run exercises.py: in one process, then in two."""
    command = ["exercises.py", *map(str, arguments)]
    yield [sys.executable, *command]
    if torch.accelerator.device_count() != 1:  # two GPUs, or two CPU cores
        yield [*TORCHRUN, "--nproc-per-node=2", *command]


def measure_rows(exercise, repeats, seconds):
    """Yield the rows of an exercise as they are measured; raise if that fails."""
    root, synthetic = data_for(exercise)
    env, pipe = {**os.environ, "DATADIR": str(root)}, subprocess.PIPE
    for launch in launches(exercise, repeats, seconds):
        job = subprocess.Popen(launch, stdout=pipe, text=True, env=env, cwd=BENCH)
        for line in filter(lambda line: line[0] == "{", job.stdout):
            row = json.loads(line)
            if synthetic:
                row["script"] += ", synthetic data"
            yield row
        if job.wait():
            raise subprocess.CalledProcessError(job.returncode, launch)


def run_check():
    """Return check.py's results on the machine's GPUs, or on two CPU cores."""
    print("Checking the machine with check.py: up to two minutes\n", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "check.json")
        processes = f"--nproc-per-node={torch.accelerator.device_count() or 2}"
        command = [*TORCHRUN, processes, "tools/check.py", "--to", file]
        subprocess.run(command, cwd=BENCH)
        text = file.read_text() if file.exists() else "{}"
    # The file is published, without paths of this machine.
    found = json.loads(text.replace(str(data_dir("")), "DATADIR"))
    if not found.get("finished"):
        raise UserError("check.py did not finish; see its output above")
    return found


def load(file):
    return json.loads(file.read_text()) if file.exists() else {"exercises": {}}


def write(results, file):
    part = file.with_suffix(".part")
    part.write_text(json.dumps(results, indent=1) + "\n")
    part.replace(file)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5, help="repeats of a case")
    parser.add_argument("--seconds", type=float, default=1.5, help="per repeat")
    only = "exercise to measure, repeatable (default: all)"
    parser.add_argument("--only", action="append", choices=REQUIRED_FILES, help=only)
    args = parser.parse_args()
    file, failed, rows = result_file(), [], []
    results = load(file) | {"check": run_check()}
    print(f"{file.stem}\n\n{HEAD}", flush=True)
    for name in args.only or REQUIRED_FILES:
        start = time.perf_counter()
        measured = {"torch": torch.__version__, "repeats": args.repeats, "rows": []}
        try:
            for row in measure_rows(name, args.repeats, args.seconds):
                rows.append(row)
                measured["rows"].append(row)
                print(format_row(row), flush=True)
                results["exercises"][name] = measured | {"complete": False}
                write(results, file)
        except subprocess.CalledProcessError:
            failed.append(name)
            continue
        measured["minutes"] = round((time.perf_counter() - start) / 60, 1)
        results["exercises"][name] = measured | {"complete": True}
        write(results, file)
    print(f"\nSaved {file}\n{format_missed(rows)}")
    if failed:
        sys.exit(f"Error: {', '.join(failed)} failed; see above (the rest is saved)")


if __name__ == "__main__":
    run(main)
