"""A counter of the steps in which a training script waits for its GPU.

    torchrun ... count_waits.py FILE SCRIPT.py [OPTIONS]

The script runs unchanged. PyTorch warns of each wait, with its line
(set_sync_debug_mode). Each rank writes FILE.RANK as JSON: the number of steps, the
median number of waits per step, and the lines that wait most.
"""

import json
import os
import runpy
import sys
import warnings
from collections import Counter
from itertools import pairwise
from pathlib import Path
from statistics import median

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

WARNING = "called a synchronizing CUDA operation"


def main():
    file, script, *options = sys.argv[1:]
    sys.argv = [script, *options]
    sys.path[0] = str(Path(script).resolve().parent)
    show, waits, lines = warnings.showwarning, [], Counter()

    def note(message, category, filename, number, *more):
        if WARNING in str(message):
            lines[f"{Path(filename).name}:{number}"] += 1
        else:
            show(message, category, filename, number, *more)

    def count(*_):
        if torch.cuda.is_available():  # only now, as the script picks its GPU first
            torch.cuda.set_sync_debug_mode("warn")
        waits.append(lines.total())

    warnings.filterwarnings("always", message=WARNING)
    warnings.showwarning = note
    register_optimizer_step_post_hook(count)
    try:
        runpy.run_path(script, run_name="__main__")
    finally:
        steps = [after - before for before, after in pairwise(waits)]
        found = {"steps": len(waits), "waits": median(steps) if steps else None}
        found["lines"] = dict(lines.most_common(5))
        Path(f"{file}.{os.environ.get('RANK', 0)}").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
