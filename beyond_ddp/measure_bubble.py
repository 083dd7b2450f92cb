"""Measure how long the GPUs of a pipeline wait; compare with (p - 1) / (m + p - 1).

    sbatch jobscript_ddp.sh measure_bubble.py

Runs pipeline.py with each schedule and several numbers of micro-batches, and times
each forward and backward pass of a stage. The rest of a step counts as waiting.
Needs no GPU.
"""

import argparse
import os
import sys
import time
from contextlib import redirect_stdout
from io import StringIO
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
from tqdm import tqdm

import pipeline
from common.device import get_device, get_ranks
from common.errors import run
from schedule import SCHEDULES

STEPS = 6  # per epoch


def synchronize(device):
    """Wait for this stream's kernels and receives, but not for its sends."""
    if device.type != "cpu":
        torch.accelerator.current_stream().synchronize()


def timed(function, seconds, device):
    """Return the function wrapped; each call appends its time to `seconds`."""

    def inner(*args, **kwargs):
        synchronize(device)  # earlier work does not count
        start = time.perf_counter()
        result = function(*args, **kwargs)
        synchronize(device)
        seconds.append(time.perf_counter() - start)
        return result

    return inner


def measure_waiting(options, device):
    """Run pipeline.py; return the fraction of a step that a GPU waits.

    It is the median over the steps but the first, which exchanges shapes, and then
    the mean over the ranks.
    """
    steps, work = [], []  # seconds of each step, and of its passes

    def make_timed_schedule(stages, *args):
        for stage in stages:
            for name in ("forward_one_chunk", "backward_one_chunk"):
                setattr(stage, name, timed(getattr(stage, name), passes, device))
        schedule = make_schedule(stages, *args)
        step = timed(schedule.step, steps, device)

        def timed_step(*args, **kwargs):
            passes.clear()
            result = step(*args, **kwargs)
            work.append(sum(passes))
            return result

        schedule.step = timed_step
        return schedule

    passes, make_schedule = [], pipeline.make_schedule
    pipeline.make_schedule = make_timed_schedule
    sys.argv = ["pipeline", *options]
    with redirect_stdout(StringIO()):
        pipeline.main()
    pipeline.make_schedule = make_schedule
    waiting = [1 - busy / step for busy, step in zip(work, steps, strict=True)]
    median = torch.tensor(waiting[1:], device=device).median()
    dist.all_reduce(median)
    return median.item() / dist.get_world_size()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--width", type=int, default=256, help="embedding dimension")
    parser.add_argument("--length", type=int, default=128, help="sequence length")
    args = parser.parse_args()
    rank, local_rank, p = get_ranks()
    print_line = print if rank == 0 else lambda line: None  # one table
    device = get_device(local_rank)
    dist.init_process_group()
    dist.init_process_group, end = lambda: None, dist.destroy_process_group
    dist.destroy_process_group = lambda: None  # one process group for all runs
    options = [f"--width={args.width}", f"--length={args.length}", "--heads=4"]
    options += [f"--layers={max(4, 2 * p)}", "--epochs=1"]
    options += ["--batch-size=16", f"--sequences={STEPS * 16 * p}"]
    print_line(f"{p} GPUs: fraction of a step spent waiting, measured (calculated)")
    with TemporaryDirectory() as folder:
        os.chdir(folder)  # for logs/
        micro_batches = p, 2 * p, 4 * p, 8 * p
        hide = None if rank == 0 else True  # None: shown only on a terminal
        runs = len(SCHEDULES) * len(micro_batches)
        bar = tqdm(total=runs, desc="runs", leave=False, disable=hide)
        for name, v in SCHEDULES.items():
            cells = []
            for m in micro_batches:
                more = [f"--schedule={name}", f"--micro-batches={m}"]
                measured = measure_waiting(options + more, device)
                calculated = (p - 1) / (v * m + p - 1)
                cells.append(f"m = {m}: {measured:.2f} ({calculated:.2f})")
                bar.update()
            print_line(f"{name:16}" + "   ".join(cells))
        bar.close()
        os.chdir("/")
    end()


if __name__ == "__main__":
    run(main)
