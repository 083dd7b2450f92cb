"""Timing of cases that take turns, and the rows of the tables."""

import json
import os
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from tqdm import trange

from common.data import make_loader
from common.device import get_device, get_ranks

HEAD = (
    "| script | what | images/s | lowest to highest | ratio | goal |\n"
    "|---|---|---|---|---|---|"
)


def main(single, scaling):
    """Print the rows of an exercise as JSON, each as soon as it is measured.

    Arguments of the program: repeats, and the seconds of each. single(repeats)
    yields the rows of one process, scaling(repeats) those of several under torchrun.
    """
    repeats = int(sys.argv[1])
    torch.set_float32_matmul_precision("high")  # as in the scripts
    torch.backends.cudnn.benchmark = not torch.version.hip
    if "RANK" not in os.environ:
        for measured in single(repeats):
            print(json.dumps(measured), flush=True)
        return
    rank, local_rank, _ = get_ranks()
    get_device(local_rank)
    dist.init_process_group()
    for measured in scaling(repeats):
        if rank == 0:
            print(json.dumps(measured), flush=True)
    dist.destroy_process_group()


def count_steps(train, most=10**6):
    """Return how many steps fill a repeat; train(steps) runs them, and waits.

    With several processes rank 0 measures, and broadcasts the number.
    """
    steps, seconds, repeat = 1, 0.0, float(sys.argv[2])
    if "RANK" not in os.environ or dist.get_rank() == 0:
        train(1)  # warm-up
        # One step of a GPU is too short to time.
        while seconds < repeat / 10 and steps <= most:
            start = time.perf_counter()
            train(steps)
            seconds = time.perf_counter() - start
            steps *= 2
        steps = min(most, max(1, round(steps / 2 * repeat / seconds)))
    if "RANK" in os.environ:
        shared = [steps]
        dist.broadcast_object_list(shared, 0)
        (steps,) = shared
    return steps


def measure(cases, repeats):
    """Return {name: images/s of each repeat} for {name: function}.

    A function returns how many images it processed, after waiting for the device.
    The cases take turns, so that other work on the machine slows all of them
    equally. Each runs once before, as a warm-up. A terminal shows a progress bar.
    """
    speeds = {name: [] for name in cases}
    what, hide = Path(sys.argv[0]).stem, None  # None: where there is no terminal
    if os.environ.get("RANK", "0") != "0":
        hide = True
    for _ in trange(1 + repeats, desc=what, unit="turn", leave=False, disable=hide):
        for name, case in cases.items():
            start = time.perf_counter()
            images = case()
            speeds[name].append(images / (time.perf_counter() - start))
    return {name: found[1:] for name, found in speeds.items()}


@contextmanager
def start_naive(program, *arguments):
    """Start a naive_*.py without env.sh's settings; yield a case that runs it.

    The malloc settings also speed up the naive version, so it is measured with and
    without them.
    """
    command = [sys.executable, program, *map(str, arguments)]
    env = {k: v for k, v in os.environ.items() if not k.startswith("MALLOC_")}
    pipe = subprocess.PIPE
    child = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=env)

    def case():
        print("go", file=child.stdin, flush=True)
        return int(child.stdout.readline())

    try:
        yield case
    finally:
        child.stdin.close()
        try:
            child.wait(10)
        except subprocess.TimeoutExpired:  # another process holds its pipe open
            child.kill()


class Batches(list):
    """A list of steps times the same batch, on the device."""

    def __init__(self, batch, steps):
        super().__init__([batch] * steps)
        self.dataset = range(steps * len(batch[0]))


def make_cases(train, train_set, batch_size, device):
    """Return the cases of a script and of its ceiling, for measure().

    train(loader) trains on all batches of a loader, and waits. The ceiling runs the
    same step on one batch that stays on the device.
    """
    images, labels = train_set.__getitems__(range(batch_size))
    batch = images.to(device), labels.to(device)
    steps = count_steps(lambda steps: train(Batches(batch, steps)))
    sampler = torch.randint(len(train_set), (steps * batch_size,)).tolist()
    loader = make_loader(train_set, batch_size, device, sampler=sampler)

    def train_on(batches):
        train(batches)
        return steps * batch_size

    return {
        "ceiling": lambda: train_on(Batches(batch, steps)),
        "script": lambda: train_on(loader),
    }


def make_row(script, what, speeds, baseline=None, goal=None):
    """Return a row of the table: speeds, and their ratio to those of a baseline.

    The ratio is the median over the repeats, which took turns.
    """
    ratio = None
    if baseline:
        ratio = median(a / b for a, b in zip(speeds, baseline, strict=True))
    figures = {"images_per_second": median(speeds), "low": min(speeds)}
    figures |= {"high": max(speeds), "repeats": len(speeds)}
    return {"script": script, "what": what, **figures, "ratio": ratio, "goal": goal}


def ceiling_rows(name, script, ceiling):
    """Return the rows of a script and its ceiling."""
    return [
        make_row(name, "ceiling", ceiling),
        make_row(name, "script / ceiling", script, ceiling, 0.95),
    ]


def scaling_rows(name, batch, train_alone, train_together, repeats):
    """Return the rows of all processes against one; all ranks call this.

    batch: images and labels on the device; train_alone(loader) trains without DDP,
    train_together(loader) with it.
    """
    rank, processes = dist.get_rank(), dist.get_world_size()
    size = len(batch[0])
    share = size // processes

    def batches(size, steps):
        return Batches([tensor[:size] for tensor in batch], steps)

    steps = count_steps(lambda steps: train_alone(batches(size, steps)))

    def apart(size, ranks):
        if rank < ranks:
            train_alone(batches(size, steps))
        dist.all_gather_object([None] * processes, None)  # wait for the slowest
        return steps * size * ranks

    def together(size):
        train_together(batches(size, steps))
        return steps * size * processes

    cases = {
        "one": lambda: apart(size, 1),
        "apart": lambda: apart(size, processes),
        "weak": lambda: together(size),
        "one, strong": lambda: apart(share * processes, 1),
        "strong": lambda: together(share),
    }
    speeds, many = measure(cases, repeats), f"{processes} x {size}"
    weak, goal = f"weak, {many} / 1 x {size}", 0.95 * processes
    strong = f"strong, {processes} x {share} / 1 x {share * processes}"
    # Without DDP: the machine's own limit.
    without = f"{many} without DDP"
    return [
        make_row(name, f"{without} / 1 x {size}", speeds["apart"], speeds["one"]),
        make_row(name, weak, speeds["weak"], speeds["one"], goal),
        make_row(name, f"weak / {without}", speeds["weak"], speeds["apart"]),
        make_row(name, strong, speeds["strong"], speeds["one, strong"]),
    ]


def format_row(row):
    """Return a row of the table, in Markdown."""
    ratio = "" if row["ratio"] is None else f"{row['ratio']:.2f}"
    goal = "" if row["goal"] is None else f"at least {row['goal']:.2f}"
    speed = f"{row['images_per_second']:.1f}"
    spread = f"{row['low']:.1f} to {row['high']:.1f}"
    cells = row["script"], row["what"], speed, spread, ratio, goal
    return f"| {' | '.join(cells)} |"
