"""Measures the training scripts against their ceilings, and prints one table.

make bench
DATADIR=/path/to/photos make bench
"""

import json
import os
import re
import subprocess
import sys
import time
from itertools import chain
from pathlib import Path

import cifar
import intro
import mnist
import torch
import torch.distributed as dist
from measure import table

import cinic_lab
import exercise8
from common.cli import OptionParser, at_least
from common.device import get_device

RESULTS = Path(__file__).parent / "results"


def scaling(repeats):
    """The part of each process of torchrun: rank 0 prints the rows."""
    get_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group()
    parts = [exercise8.scaling(name, repeats) for name in exercise8.BACKBONES]
    for exercise in (mnist, cifar, cinic_lab, intro):
        parts.append(exercise.scaling(repeats))
    rows = list(chain(*parts))
    if dist.get_rank() == 0:
        print(json.dumps(rows))
    dist.destroy_process_group()


def processor():
    """Return the name of the GPU, or else of the CPU."""
    if get_device().type != "cpu":
        return torch.cuda.get_device_name()
    with open("/proc/cpuinfo") as info:
        return next(
            line.split(": ")[1].strip() for line in info if "model name" in line
        )


def main():
    parser = OptionParser(__doc__)
    parser.add_argument("--repeats", type=at_least(1), default=5)
    args = parser.parse_args()
    if "RANK" in os.environ:
        return scaling(args.repeats)
    start = time.perf_counter()
    rows = list(exercise8.input_only(args.repeats))
    for backbone in exercise8.BACKBONES:
        rows += exercise8.single(backbone, args.repeats)
    for exercise in (mnist, cifar, cinic_lab, intro):
        rows += exercise.single(args.repeats)
    if torch.accelerator.device_count() != 1:  # two GPUs, or two CPU cores
        launch = [sys.executable, "-m", "common.torchrun", "--standalone"]
        launch += ["--nproc-per-node=2", __file__, f"--repeats={args.repeats}"]
        done = subprocess.run(launch, stdout=subprocess.PIPE, text=True, check=True)
        rows += json.loads(done.stdout.splitlines()[-1])
    result = {
        "processor": processor(),
        "torch": torch.__version__,
        "minutes": round((time.perf_counter() - start) / 60, 1),
        "rows": rows,
    }
    RESULTS.mkdir(exist_ok=True)
    file = RESULTS / f"{re.sub('[^A-Za-z0-9]+', '-', processor()).strip('-')}.json"
    file.write_text(json.dumps(result, indent=1) + "\n")
    print(table(rows))
    print(
        f"\nOn {result['processor']}, in {result['minutes']} minutes; saved {file}"
    )


if __name__ == "__main__":
    main()
