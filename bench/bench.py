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
from timing import HEAD, format_row

from common.data import REPOSITORY, data_dir
from common.errors import UserError, run
from common.synthetic import SYNTHETIC_DIR
from tools.check import REQUIRED_FILES

BENCH = Path(__file__).resolve().parent
RESULTS = BENCH / "results"
TORCHRUN = [sys.executable, "-m", "common.torchrun", "--standalone"]
# The image files that the naive version of an exercise reads.
IMAGES = {
    "exercise8": ["dogs-vs-cats/train-2000/train"],
    "cinic_lab": ["CINIC/CINIC-10/train"],
}


def processor():
    """Return the name of the GPU, or of the CPU and its instruction set."""
    if (
        torch.accelerator.device_count()
    ):  # without allocating its memory: others compute
        kind = torch.accelerator.current_accelerator()
        return torch.get_device_module(kind).get_device_name(0)
    names = re.findall("model name.*: (.*)", Path("/proc/cpuinfo").read_text())
    return f"{names[0]}, {torch.backends.cpu.get_cpu_capability()}"


def data_for(exercise):
    """Return the DATADIR to use, and whether its data are synthetic; make these."""
    root = data_dir("")
    needed = REQUIRED_FILES[exercise] + IMAGES.get(exercise, [])
    lacking = [name for name in needed if not (root / name).exists()]
    if not lacking:
        return root, bool(
            REQUIRED_FILES[exercise]
        ) and root.resolve() == SYNTHETIC_DIR.resolve()
    why = f"no {', '.join(lacking)} in {root}"
    print(f"{exercise} on synthetic data: {why}", flush=True)
    make = [sys.executable, "sample_data.py"]
    subprocess.run(make, cwd=REPOSITORY / exercise, check=True)
    return SYNTHETIC_DIR, True


def result_file():
    """Return the file for this processor's results."""
    return RESULTS / f"{re.sub('[^A-Za-z0-9]+', '-', processor()).strip('-')}.json"


def measure_rows(exercise, root, synthetic, *, repeats, seconds):
    """Yield the rows of an exercise as they are measured; raise if that fails."""
    command = [f"{exercise}.py", str(repeats), str(seconds)]
    launches = [[sys.executable, *command]]
    if torch.accelerator.device_count() != 1:  # two GPUs, or two CPU cores
        launches.append([*TORCHRUN, "--nproc-per-node=2", *command])
    for launch in launches:
        env = {**os.environ, "DATADIR": str(root)}
        with subprocess.Popen(
            launch, stdout=subprocess.PIPE, text=True, env=env, cwd=BENCH
        ) as job:
            for printed in filter(lambda text: text[0] == "{", job.stdout):
                row = json.loads(printed)
                if synthetic:
                    row["script"] += ", synthetic data"
                yield row
        if job.returncode:
            raise subprocess.CalledProcessError(job.returncode, launch)


def run_check(limit=600):
    """Return check.py's results on the machine's GPUs, or on two CPU cores.

    Raises UserError if it does not finish within `limit` seconds.
    """
    print("Checking the machine with check.py: up to two minutes\n", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "check.json")
        processes = f"--nproc-per-node={torch.accelerator.device_count() or 2}"
        command = [*TORCHRUN, processes, "tools/check.py", "--to", file]
        with subprocess.Popen(command, cwd=BENCH) as job:
            try:
                job.wait(limit)
            except subprocess.TimeoutExpired:
                job.terminate()  # torchrun then ends the ranks
        found = json.loads(file.read_text()) if file.exists() else {}
        if not found.get("finished"):
            raise UserError("check.py did not finish; see its output above")
        for row in found["data"]:  # the file is published: no paths of this machine
            del row["datadir"], row["file"]
        return found


def load(file):
    return json.loads(file.read_text()) if file.exists() else {"exercises": {}}


def write(results, file):
    part = file.with_suffix(".part")
    part.write_text(json.dumps(results, indent=1) + "\n")
    part.replace(file)


def minutes_of(name, results, others):
    """Return the minutes an exercise took here, or at most on others, or None."""
    known = [r["exercises"].get(name, {}).get("minutes") for r in (results, *others)]
    return known[0] or max(filter(None, known), default=None)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--repeats", type=int, default=5, help="repeats of each case"
    )
    parser.add_argument(
        "--seconds", type=float, default=2.0, help="seconds per repeat, roughly"
    )
    parser.add_argument(
        "--only",
        action="append",
        choices=REQUIRED_FILES,
        metavar="EXERCISE",
        help="exercise to measure, repeatable (default: all)",
    )
    args = parser.parse_args()
    file, names = result_file(), args.only or list(REQUIRED_FILES)
    results = load(file)
    results["check"] = run_check()
    data = {name: data_for(name) for name in names}
    others = [load(other) for other in RESULTS.glob("*.json")]
    minutes = [minutes_of(name, results, others) for name in names]
    about = f"about {sum(minutes):.0f}" if all(minutes) else "an unknown number of"
    print(f"On {processor()}: {about} minutes\n\n{HEAD}", flush=True)
    failed = []
    for name, (root, synthetic) in data.items():
        start, rows = time.perf_counter(), []
        before = results["exercises"].get(name, {})
        measured = {"torch": torch.__version__, "repeats": args.repeats}
        measured["rows"] = rows
        try:
            for row in measure_rows(
                name, root, synthetic, repeats=args.repeats, seconds=args.seconds
            ):
                rows.append(row)
                print(format_row(row), flush=True)
                # Until it is complete, keep the minutes of the last run.
                results["exercises"][name] = before | measured | {"complete": False}
                write(results, file)
        except subprocess.CalledProcessError:
            failed.append(name)
            continue
        minutes = round((time.perf_counter() - start) / 60, 1)
        measured |= {"minutes": minutes, "complete": True}
        results["exercises"][name] = measured
        write(results, file)
    print(f"\nSaved {file}")
    if failed:
        sys.exit(f"Error: {', '.join(failed)} failed; see above (the rest is saved)")


if __name__ == "__main__":
    run(main)
