"""Measures how long the GPUs of a pipeline wait, beside (p - 1) / (m + p - 1).

    sbatch jobscript_ddp.sh beyond_ddp/measure_bubble.py

It runs pipeline.py with each schedule and several numbers of micro-batches, and
times each forward and backward pass of a stage; the rest of a step is waiting.
It needs no GPU.
"""

import os
import sys
import time
from contextlib import redirect_stdout
from tempfile import TemporaryDirectory

import pipeline
import torch
import torch.distributed as dist
from tqdm import tqdm

from common.cli import OptionParser, at_least
from common.device import get_device, get_ranks
from common.log import rank0_print
from schedule import SCHEDULES


def wait(device):
    """Wait for what this stream has to do and to receive, not for what is sent."""
    if device.type != "cpu":
        torch.accelerator.current_stream().synchronize()


def timed(function, seconds, device):
    """Return a function that does the same, and notes how long it takes."""

    def inner(*args, **kwargs):
        wait(device)  # what comes before is not its own
        start = time.perf_counter()
        result = function(*args, **kwargs)
        wait(device)
        seconds.append(time.perf_counter() - start)
        return result

    return inner


def waiting(options, device):
    """Run pipeline.py; return the part of a step that the GPUs wait, on the mean.

    Of the median step of each rank; the first one, which also learns shapes, is left
    out.
    """
    steps, work = [], []  # seconds of steps, and of the passes of each

    def watched(stages, *args):
        for stage in stages:
            for name in ("forward_one_chunk", "backward_one_chunk"):
                setattr(stage, name, timed(getattr(stage, name), passes, device))
        schedule = make_schedule(stages, *args)
        step = timed(schedule.step, steps, device)

        def noted(*args, **kwargs):
            passes.clear()
            result = step(*args, **kwargs)
            work.append(sum(passes))
            return result

        schedule.step = noted
        return schedule

    passes, make_schedule = [], pipeline.make_schedule
    pipeline.make_schedule = watched
    sys.argv = ["pipeline", *options]
    with redirect_stdout(None):
        pipeline.main()
    pipeline.make_schedule = make_schedule
    parts = [1 - busy / step for busy, step in zip(work, steps, strict=True)]
    mean = torch.tensor(parts[1:], device=device).median()
    dist.all_reduce(mean)
    return mean.item() / dist.get_world_size()


def main():
    parser = OptionParser(__doc__)
    add = parser.add_argument
    add("--batch-size", type=at_least(1), default=16, help="sequences per GPU")
    add(
        "--layers", type=at_least(1), help="default: 4, or 2 per GPU if that is more"
    )
    add("--width", type=at_least(1), default=256, help="numbers for each token")
    add("--heads", type=at_least(1), default=4, help="of attention")
    add("--length", type=at_least(1), default=128, help="of a sequence, in tokens")
    add("--steps", type=at_least(2), default=6, help="of each run")
    args = parser.parse_args()
    rank, local_rank, p = get_ranks()
    args.layers = args.layers or max(4, 2 * p)
    device = get_device(local_rank)
    dist.init_process_group()
    dist.init_process_group, end = lambda: None, dist.destroy_process_group
    dist.destroy_process_group = lambda: None  # one group for all runs
    size = {name.replace("_", "-"): value for name, value in vars(args).items()}
    size["sequences"] = size.pop("steps") * args.batch_size * p
    options = [f"--{name}={value}" for name, value in size.items()]
    rank0_print(f"{p} GPUs: part of a step that they wait, measured (calculated)")
    with TemporaryDirectory() as folder:
        os.chdir(folder)  # for logs/
        numbers = p, 2 * p, 4 * p, 8 * p  # of micro-batches
        hide = None if rank == 0 else True  # None: where there is no terminal
        runs = len(SCHEDULES) * len(numbers)
        bar = tqdm(total=runs, desc="runs", leave=False, disable=hide)
        for name, v in SCHEDULES.items():
            cells = []
            for m in numbers:
                own = [f"--schedule={name}", f"--micro-batches={m}", "--epochs=1"]
                measured = waiting(options + own, device)
                cells.append(
                    f"m = {m}: {measured:.2f} ({(p - 1) / (v * m + p - 1):.2f})"
                )
                bar.update()
            rank0_print(f"{name:16}" + "   ".join(cells))
        bar.close()
        os.chdir("/")
    end()


if __name__ == "__main__":
    main()
