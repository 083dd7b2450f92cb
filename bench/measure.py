"""How everything is measured here: in turns, several times, and by the median."""

import json
import os
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import torch.distributed as dist
from tqdm import trange

from common.device import get_device, get_ranks


def main(single, scaling):
    """Print the rows of an exercise, each when it is measured, as JSON.

    Options: how many repeats, and about how many seconds each takes.
    single(repeats) and scaling(repeats) yield those of one process, and of several
    that torchrun started.
    """
    repeats = int(sys.argv[1])
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


def steps_for(train, most=10**6):
    """Return how many steps fill a repeat; train(steps) does them, and waits.

    Of several processes rank 0 alone tries it, and tells the others.
    """
    steps, seconds, repeat = 1, 0.0, float(sys.argv[2])
    if "RANK" not in os.environ or dist.get_rank() == 0:
        train(1)  # for what is slow only at first
        # A step of a GPU is too short to be timed.
        while seconds < repeat / 10 and steps <= most:
            start = time.perf_counter()
            train(steps)
            seconds = time.perf_counter() - start
            steps *= 2
        steps = min(most, max(1, round(steps / 2 * repeat / seconds)))
    if "RANK" in os.environ:
        told = [steps]
        dist.broadcast_object_list(told, 0)
        (steps,) = told
    return steps


def measure(cases, repeats):
    """Return {name: images/s of each repeat} for {name: what to call}.

    What is called returns how many images it did, after waiting for the device. The
    cases take turns, so that what else the machine does slows all alike. Each is
    called once before, for what is slow only at first. A bar on a terminal says how
    many turns are done.
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
def as_it_comes(program, *arguments):
    """Give a case that makes a program of the plain way do its work once.

    env.sh tunes how memory is allocated, and that helps the plain way too. So it is
    also measured as it comes: in a process of its own, without these settings.
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
        except subprocess.TimeoutExpired:  # somebody else holds its pipe open
            child.kill()


def row(script, what, speeds, against=None, goal=None):
    """Return a row of the table: speeds, and their ratio to others taken in turns.

    The ratio is the median of the ratios of the repeats.
    """
    ratio = against and median(a / b for a, b in zip(speeds, against, strict=True))
    figures = {"images_per_second": median(speeds), "low": min(speeds)}
    figures |= {"high": max(speeds), "repeats": len(speeds)}
    return {"script": script, "what": what, **figures, "ratio": ratio, "goal": goal}


def against_one(name, batch, alone, together, repeats):
    """Return the rows of all processes of a job against one; all of them call it.

    alone(size, steps) and together(size, steps) train for so many steps on batches
    of this size, without DDP and with it.
    """
    rank, processes = dist.get_rank(), dist.get_world_size()
    steps = steps_for(lambda steps: alone(batch, steps))
    share = batch // processes

    def apart(size, ranks):
        if rank < ranks:
            alone(size, steps)
        dist.all_gather_object([None] * processes, None)  # all wait for the slowest
        return steps * size * ranks

    def all_of_them(size):
        together(size, steps)
        return steps * size * processes

    cases = {
        "one": lambda: apart(batch, 1),
        "apart": lambda: apart(batch, processes),
        "weak": lambda: all_of_them(batch),
        "one, strong": lambda: apart(share * processes, 1),
        "strong": lambda: all_of_them(share),
    }
    speeds, many = measure(cases, repeats), f"{processes} x {batch}"
    weak, goal = f"weak, {many} / 1 x {batch}", 0.95 * processes
    strong = f"strong, {processes} x {share} / 1 x {share * processes}"
    # Without DDP: what this machine has to give.
    without = f"{many} without DDP"
    return [
        row(name, f"{without} / 1 x {batch}", speeds["apart"], speeds["one"]),
        row(name, weak, speeds["weak"], speeds["one"], goal),
        row(name, f"weak / {without}", speeds["weak"], speeds["apart"]),
        row(name, strong, speeds["strong"], speeds["one, strong"]),
    ]


HEAD = (
    "| script | what | images/s | lowest to highest | ratio | goal |\n"
    "|---|---|---|---|---|---|"
)


def line(r):
    """Return a row of the table, in Markdown."""
    ratio = "" if r["ratio"] is None else f"{r['ratio']:.2f}"
    goal = "" if r["goal"] is None else f"at least {r['goal']:.2f}"
    speeds = f"{r['images_per_second']:.1f} | {r['low']:.1f} to {r['high']:.1f}"
    return f"| {r['script']} | {r['what']} | {speeds} | {ratio} | {goal} |"
