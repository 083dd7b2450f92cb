"""Timing of cases that take turns, and the rows of the tables."""

import time
from itertools import chain, islice, repeat
from statistics import median

import torch
import torch.distributed as dist

from common.data import make_loader

HEAD = (
    "| script | what | images/s | lowest to highest | ratio | goal |\n"
    "|---|---|---|---|---|---|"
)
# Averaging more bytes takes two processes on one machine over 5 % of a step.
SMALL_GRADIENTS = 4e6


def count_steps(train, seconds):
    """Return how many steps take these seconds; train(steps) runs them and waits."""
    steps, elapsed = 1, 0.0
    train(1)  # warm-up
    # One step of a GPU is too short to time.
    while elapsed < seconds / 10 and steps <= 10**6:
        start = time.perf_counter()
        train(steps)
        elapsed = time.perf_counter() - start
        steps *= 2
    return max(1, round(steps / 2 * seconds / elapsed))


def measure(cases, repeats):
    """Return {name: images/s of each repeat} for {name: function}.

    A function returns how many images it processed, after waiting for the device.
    The cases take turns, so that other work on the machine slows all of them
    equally. Each runs once before, as a warm-up.
    """
    speeds = {name: [] for name in cases}
    for _ in range(1 + repeats):
        for name, case in cases.items():
            start = time.perf_counter()
            images = case()
            speeds[name].append(images / (time.perf_counter() - start))
    return {name: found[1:] for name, found in speeds.items()}


class Batches(list):
    """A list with the same batch, on the device, `steps` times."""

    def __init__(self, batch, steps):
        super().__init__([batch] * steps)
        self.dataset = range(steps * len(batch[0]))


def make_cases(train, train_set, batch_size, device, seconds):
    """Return the cases of a script and of its ceiling, for measure().

    train(loader) trains on all batches of a loader, and waits. The ceiling runs the
    same step on one batch that stays on the device.
    """
    batch = [t.to(device) for t in train_set.__getitems__(range(batch_size))]
    steps = count_steps(lambda steps: train(Batches(batch, steps)), seconds)
    sampler = torch.randint(len(train_set), (steps * batch_size,)).tolist()
    loader = make_loader(train_set, batch_size, device, sampler=sampler)

    def train_on(batches):
        train(batches)
        return steps * batch_size

    return {
        "ceiling": lambda: train_on(Batches(batch, steps)),
        "script": lambda: train_on(loader),
    }


def make_input_case(loader, seconds):
    """Return the case of a loader alone, with as many batches as fill the time."""

    def load(steps):
        batches = chain.from_iterable(repeat(loader))
        return sum(len(images) for images, _ in islice(batches, steps))

    steps = count_steps(load, seconds)
    return lambda: load(steps)


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


def compare(script, speeds, what, baseline, goal):
    """Return the rows of a baseline and of the cases that are compared with it."""
    slow, both = speeds[baseline], f"{what} / {baseline}"
    own = make_row(script, both, speeds[what], slow, goal)
    return [make_row(script, baseline, slow), own]


def scaling_rows(name, batch, alone, together, averaged, repeats, seconds):
    """Return the rows of all processes against one; all ranks call this.

    batch: images and labels on the device; alone(loader) trains without DDP,
    together(loader) with it, and averages this many bytes in each step.
    """
    rank, processes = dist.get_rank(), dist.get_world_size()
    size = len(batch[0])
    share, steps = size // processes, [0]
    if rank == 0:
        steps = [count_steps(lambda n: alone(Batches(batch, n)), seconds)]
    dist.broadcast_object_list(steps)

    def train_apart(ranks):
        if rank < ranks:
            alone(Batches(batch, *steps))
        dist.all_gather_object([None] * processes, None)  # wait for the slowest
        return steps[0] * size * ranks

    def train_together(size):
        together(Batches([tensor[:size] for tensor in batch], *steps))
        return steps[0] * size * processes

    cases = {
        "one": lambda: train_apart(1),
        "apart": lambda: train_apart(processes),
        "weak": lambda: train_together(size),
        "strong": lambda: train_together(share),
    }
    one, apart, weak, strong = measure(cases, repeats).values()
    single, many = f"1 x {size}", f"{processes} x {size}"
    # In every step DDP waits for the slower process, however few its gradients are.
    goal = 0.9 if averaged <= SMALL_GRADIENTS else None
    # Without DDP: the machine's own limit.
    return [
        make_row(name, f"{many} without DDP / {single}", apart, one),
        make_row(name, f"weak, {many} / {single}", weak, one),
        make_row(name, f"weak / {many} without DDP", weak, apart, goal),
        make_row(name, f"strong, {processes} x {share} / {single}", strong, one),
    ]


def format_row(row):
    """Return a row of the table, in Markdown."""
    ratio = "" if row["ratio"] is None else f"{row['ratio']:.2f}"
    goal = "" if row["goal"] is None else f"at least {row['goal']:.2f}"
    speed = f"{row['images_per_second']:.1f}"
    spread = f"{row['low']:.1f} to {row['high']:.1f}"
    cells = row["script"], row["what"], speed, spread, ratio, goal
    return f"| {' | '.join(cells)} |"


def format_missed(rows):
    """Return a line that lists the rows whose printed ratio is below their goal."""
    missed = [
        f"{row['script']}, {row['what']} {row['ratio']:.2f} (goal {row['goal']:.2f})"
        for row in rows
        if row["goal"] and round(row["ratio"], 2) < row["goal"]
    ]
    return f"Missed: {'; '.join(missed)}" if missed else "All goals met"
