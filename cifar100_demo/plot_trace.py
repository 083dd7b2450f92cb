"""Draws the last step of a profiler's trace, as Perfetto would show it.

    python plot_trace.py [logs/profiler/trace.json] [--to FILE.png]

From left to right is time. Each thread and each GPU stream has a band; what is below
an operator was called by it.
"""

import json
from collections import defaultdict
from pathlib import Path

from matplotlib.figure import Figure

from common.cli import OptionParser, UserError

KINDS = {  # colour, and what a name holds; the first that fits
    "communication": ("red", ("nccl", "rccl", "gloo", "all_reduce", "allreduce")),
    "batch norm": ("tab:orange", ("batch_norm", "batchnorm", "bn_")),
    "convolution": ("tab:blue", ("conv", "cudnn", "implicit_gemm", "xmma")),
    "optimizer": ("green", ("optimizer",)),
    "other": ("0.7", ("",)),
}
DEPTH = 5  # operators inside of operators, so many are drawn


def read_events(file):
    """Return the trace's events of the last whole step, or raise UserError."""
    try:
        events = json.loads(Path(file).read_text())["traceEvents"]
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"cannot read {file}: {error}") from None
    events = [e for e in events if e.get("ph") == "X" and e.get("dur", 0) > 0]
    steps = [e for e in events if e["name"].startswith("ProfilerStep")]
    if not steps:
        raise UserError(f"no step in {file}: profile 8 steps at least")
    # On a GPU a step has two, of the CPU that asks and of the stream that works.
    last = max(steps, key=lambda step: step["ts"])["name"]
    steps = [step for step in steps if step["name"] == last]
    start = min(step["ts"] for step in steps)
    end = max(step["ts"] + step["dur"] for step in steps)
    return [
        e | {"ts": (e["ts"] - start) / 1e3, "dur": e["dur"] / 1e3}
        for e in events
        if start <= e["ts"] < end and e.get("cat") != "gpu_user_annotation"
    ]


def colour(name):
    name = name.lower()
    return next(c for c, words in KINDS.values() if any(w in name for w in words))


def draw(events, file):
    """Save a PNG: times in ms from the start of the step."""
    bands = defaultdict(list)
    for event in sorted(events, key=lambda e: (e["ts"], -e["dur"])):
        bands[f"{event['pid']}, {event['tid']}"].append(event)
    figure = Figure(figsize=(13, 1 + 1.2 * len(bands)), layout="constrained")
    axes = figure.add_subplot()
    top, ticks = 0, {}
    for band, members in bands.items():
        open_until, deepest = [], 0
        for event in members:
            while open_until and open_until[-1] <= event["ts"]:
                open_until.pop()
            depth = len(open_until)
            open_until.append(event["ts"] + event["dur"])
            if depth >= DEPTH:
                continue
            deepest = max(deepest, depth)
            axes.broken_barh(
                [(event["ts"], event["dur"])],
                (top - depth - 1, 0.9),
                facecolors=colour(event["name"]),
                linewidth=0,
            )
        ticks[band] = top - (deepest + 1) / 2
        top -= deepest + 2
    axes.set_yticks(list(ticks.values()), list(ticks))
    axes.set(xlabel="ms since the start of the step", ylabel="process, thread")
    for name, (shade, _) in KINDS.items():
        axes.barh(0, 0, color=shade, label=name)
    axes.legend(ncols=len(KINDS), loc="lower center", bbox_to_anchor=(0.5, 1))
    figure.savefig(file, dpi=110)


def main():
    parser = OptionParser(__doc__)
    add = parser.add_argument
    add("file", nargs="?", default="logs/profiler/trace.json", help="trace to read")
    add("--to", type=Path, default=Path("logs/trace.png"), help="PNG to write")
    args = parser.parse_args()
    events = read_events(args.file)
    args.to.parent.mkdir(parents=True, exist_ok=True)
    draw(events, args.to)
    print(f"Saved {args.to}")


if __name__ == "__main__":
    main()
