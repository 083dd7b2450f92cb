"""Plot of the last step in a profiler trace: a band per thread and GPU stream.

    python plot_trace.py [logs/profiler/train_cifar100.json] [--to FILE.png]

Without a file name it plots the newest trace in logs/profiler. To see the name of
each operator, open the trace at https://ui.perfetto.dev.
"""

import argparse
import json
import os
from pathlib import Path

from matplotlib.figure import Figure

from common.errors import UserError, run

# Colours that the colour-blind can tell apart (Paul Tol's), and parts of operator
# names; the last match wins.
KINDS = {
    "other": ("#aaaaaa", ()),
    "convolution": ("#332288", ("conv", "cudnn", "gemm", "xmma", "fprop")),
    "batch norm": ("#ddcc77", ("batch_norm", "batchnorm", "bn_")),
    "optimizer": ("#88ccee", ("optimizer", "fused_sgd", "fusedsgd")),
    "communication": (
        "#228833",
        ("nccl", "rccl", "gloo", "all_reduce", "allreduce"),
    ),
}
ROLES = {  # of a thread, by the prefix of one of its operators
    "ProfilerStep": "main thread",
    "autograd::engine": "backward thread",
    "gloo:": "Gloo's thread",
    "nccl:": "NCCL's thread",
}
PHASES = {  # of a step, by the prefixes of their operators
    "backward": ("autograd::engine", "torch.distributed.ddp.reducer"),
    "optimizer": ("Optimizer.step",),
}
GPU = ("kernel", "gpu_memcpy", "gpu_memset")
MAX_BANDS = 20  # a GPU's trace contains about ten
# No work of the script: step markers on the GPU's timeline, profiler overhead.
SKIPPED = ("gpu_user_annotation", "overhead", "Trace")


def read_step(file):
    """Return the last step as {band: [(name, start, duration)]}, times in ms.

    band: (on_gpu, process or GPU, thread or stream). Raises UserError if the file
    contains no step.
    """
    if not file.exists():
        scripts = "run_single_cifar.sh` or `bash run_ddp_cifar100.sh"
        raise UserError(f"no {file}; run `bash {scripts}`")
    events = json.loads(file.read_text())["traceEvents"]
    events = [event for event in events if event.get("dur", 0) > 0]
    steps = [event for event in events if event["name"].startswith("ProfilerStep")]
    if not steps:
        raise UserError(f"no step in {file}; profile a run of at least 8 steps")
    # On a GPU a step has two events: on the CPU's timeline and on the GPU's.
    last = max(steps, key=lambda step: step["ts"])["name"]
    steps = [step for step in steps if step["name"] == last]
    start = min(step["ts"] for step in steps)
    end = max(step["ts"] + step["dur"] for step in steps)
    bands = {}
    for event in events:
        if start <= event["ts"] < end and event.get("cat") not in SKIPPED:
            band = event.get("cat") in GPU, event["pid"], event["tid"]
            times = (event["ts"] - start) / 1e3, event["dur"] / 1e3
            bands.setdefault(band, []).append((event["name"], *times))
    return bands


def find_kind(name):
    """Return the kind, of KINDS, of an operator or kernel."""
    match = "other"
    for kind, (_, words) in KINDS.items():
        if any(word in name.lower() for word in words):
            match = kind
    return match


def name_band(band, events):
    """Return the label of a thread or a GPU stream."""
    on_gpu, process, thread = band
    if on_gpu:
        return f"GPU {process}, stream {thread}"
    for prefix, role in ROLES.items():
        if any(name.startswith(prefix) for name, *_ in events):
            return role
    return f"thread {thread}"


def find_phases(bands):
    """Return {phase: its start in ms} on the CPU, which launches the GPU kernels."""
    phases = {"forward": 0}
    for phase, prefixes in PHASES.items():
        starts = [
            start
            for (on_gpu, *_), events in bands.items()
            for name, start, _ in events
            if not on_gpu and name.startswith(prefixes)
        ]
        if starts:
            phases[phase] = min(starts)
    return phases


def pick_busiest(bands):
    """Return the MAX_BANDS bands whose operators take longest; report the count."""
    if len(bands) <= MAX_BANDS:
        return bands
    print(f"{len(bands)} threads and streams: plots the {MAX_BANDS} busiest")
    busy = {band: sum(row[2] for row in events) for band, events in bands.items()}
    busiest = sorted(bands, key=busy.get, reverse=True)[:MAX_BANDS]
    return {band: bands[band] for band in busiest}


def plot(bands, file):
    """Save a PNG with a row of bars for each band."""
    bands = pick_busiest(bands)
    names = {band: name_band(band, events) for band, events in bands.items()}
    # The main thread, the other threads, then the GPU streams.
    order = sorted(bands, key=lambda band: (band[0], names[band] != "main thread"))
    figure = Figure(figsize=(8.3, 1.5 + 0.6 * len(bands)), layout="constrained")
    axes = figure.add_subplot()
    for y, band in enumerate(order):
        bars = {kind: [] for kind in KINDS}
        for name, start, duration in bands[band]:
            if not name.startswith("ProfilerStep"):
                bars[find_kind(name)].append((start, duration))
        for kind, (colour, _) in KINDS.items():
            label = kind if y == 0 else None
            axes.broken_barh(bars[kind], (y - 0.4, 0.8), color=colour, label=label)
    for phase, start in find_phases(bands).items():
        axes.axvline(start, color="black", linestyle=":")
        axes.text(start, -0.6, f" {phase}", fontsize=12)
    axes.set_yticks(range(len(order)), [names[band] for band in order], fontsize=12)
    axes.set_ylim(len(order) - 0.5, -1)
    axes.tick_params("x", labelsize=11)
    axes.set_xlabel("ms since the start of the step", fontsize=12)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(ncols=len(KINDS), loc="outside upper center", fontsize=11)
    figure.savefig(file, dpi=100)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "file", nargs="?", type=Path, help="trace to read (default: the newest)"
    )
    parser.add_argument(
        "--to", type=Path, default=Path("logs/trace.png"), help="PNG to write"
    )
    args = parser.parse_args()
    folder = Path("logs/profiler")
    first = folder / "train_cifar100.json"  # of task 1
    newest = max(folder.glob("*.json"), key=os.path.getmtime, default=first)
    file = args.file or newest
    bands = read_step(file)
    args.to.parent.mkdir(parents=True, exist_ok=True)
    plot(bands, args.to)
    print(f"Plot of {file} saved to {args.to}")


if __name__ == "__main__":
    run(main)
