"""Draws the last step of a profiler's trace, as Perfetto would show it.

    python plot_trace.py [logs/profiler/trace.json] [--to FILE.png]

Without a file's name it takes the newest in logs/profiler, of rank 0. From left to
right is time. Each thread and each GPU stream has a band; what is below an operator
was called by it.
"""

import json
from collections import defaultdict
from pathlib import Path

from matplotlib.figure import Figure

from common.cli import OptionParser, UserError

KINDS = {  # colour, and what a name holds; the first that fits
    "communication": ("red", ("nccl", "rccl", "gloo", "all_reduce", "allreduce")),
    "batch norm": ("tab:orange", ("batch_norm", "batchnorm", "bn_")),
    "convolution": ("tab:blue", ("conv", "cudnn", "gemm", "xmma", "fprop")),
    "optimizer": ("green", ("optimizer", "fused_sgd", "fusedsgd")),
    "other": ("0.7", ("",)),
}
# What a step is made of, by how the names of its operators begin.
PHASES = {
    "backward": ("autograd::engine", "torch.distributed.ddp.reducer"),
    "optimizer": ("Optimizer.step",),
}
SHADES = {"forward": "lightblue", "backward": "khaki", "optimizer": "yellowgreen"}
GPU = "kernel", "gpu_memcpy", "gpu_memset"
# Not work: the steps' names on the GPU's side, and the profiler's own trouble.
SKIPPED = "gpu_user_annotation", "overhead", "Trace"
DEPTH = 4  # operators inside of operators, so many are drawn


def read_trace(file):
    """Return the events of the last whole step, in ms, and the process's name.

    Raises UserError if the file has none.
    """
    try:
        trace = json.loads(Path(file).read_text())
        events = [e for e in trace["traceEvents"] if e.get("dur", 0) > 0]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"cannot read {file}: {error}") from None
    steps = [e for e in events if e["name"].startswith("ProfilerStep")]
    if not steps:
        raise UserError(f"no step in {file}: profile 8 steps at least")
    # On a GPU a step has two, of the CPU that asks and of the stream that works.
    last = max(steps, key=lambda step: step["ts"])["name"]
    steps = [step for step in steps if step["name"] == last]
    start = min(step["ts"] for step in steps)
    end = max(step["ts"] + step["dur"] for step in steps)
    process = next(e["pid"] for e in steps if e.get("cat") != "gpu_user_annotation")
    rank = trace.get("distributedInfo", {}).get("rank")
    return [
        e | {"ts": (e["ts"] - start) / 1e3, "dur": e["dur"] / 1e3}
        for e in events
        if start <= e["ts"] < end and e.get("cat") not in SKIPPED
    ], f"process {process}" if rank is None else f"rank {rank}"


def kind(event):
    """Return which of KINDS an event is, by its name."""
    name = event["name"].lower()
    return next(k for k, (_, words) in KINDS.items() if any(map(name.count, words)))


def role(events):
    """Return what one thread or stream does, from its events."""
    names, kinds = [event["name"] for event in events], set(map(kind, events))
    if events[0].get("cat") in GPU:
        work = "copies" if {e["cat"] for e in events} <= {*GPU[1:]} else "computes"
        work = "NCCL" if kinds == {"communication"} else work
        return f"GPU {events[0]['pid']}, stream {events[0]['tid']}: {work}"
    beginnings = {
        "ProfilerStep": "main thread",
        "autograd::engine": "backward (autograd) thread",
        "gloo:": "Gloo's thread",
        "nccl:": "NCCL's thread",
    }
    for beginning, words in beginnings.items():
        if any(name.startswith(beginning) for name in names):
            return words
    return f"thread {events[0]['tid']}"


def span(events):
    """Return when the first of them starts and the last one ends, in ms."""
    return min(e["ts"] for e in events), max(e["ts"] + e["dur"] for e in events)


def phases_of_calls(events):
    """Return {phase: (start, end)} of what the CPU does, or asks a GPU to do."""
    found = {}
    for phase, beginnings in PHASES.items():
        if calls := [e for e in events if e["name"].startswith(beginnings)]:
            found[phase] = span(calls)
    if "backward" in found:
        found = {"forward": (0, found["backward"][0])} | found
    return found


def phases_of_kernels(events, calls):
    """Return the same of a GPU: a kernel is of the phase that asked for it."""
    asked = {
        e["args"]["correlation"]: e["ts"]
        for e in events
        if e.get("cat") not in GPU and "correlation" in e.get("args", {})
    }
    found = defaultdict(list)
    for event in events:
        if event.get("cat") in GPU:
            when = asked.get(event["args"].get("correlation"), -1)
            for phase, (start, end) in calls.items():
                if start <= when < end:
                    found[phase].append(event)
    return {phase: span(kernels) for phase, kernels in found.items()}


def bars(events):
    """Return {(depth, kind): [(start, length)]} of one thread's events."""
    found, open_until = defaultdict(list), []
    for event in sorted(events, key=lambda e: (e["ts"], -e["dur"])):
        while open_until and open_until[-1] <= event["ts"]:
            open_until.pop()
        if len(open_until) < DEPTH:
            found[len(open_until), kind(event)].append((event["ts"], event["dur"]))
        open_until.append(event["ts"] + event["dur"])
    return found


def draw(events, process, file):
    """Save a PNG: times in ms from the start of the step."""
    bands = defaultdict(list)
    for event in events:
        bands[event["pid"], event["tid"]].append(event)
    roles = {band: role(members) for band, members in bands.items()}
    # Threads before streams, the main thread first.
    order = sorted(
        bands, key=lambda b: ("stream" in roles[b], "main" not in roles[b])
    )
    calls = phases_of_calls(events)
    kernels = phases_of_kernels(events, calls)
    figure = Figure(layout="constrained")
    axes = figure.add_subplot()
    width = 1.1 * span(events)[1]  # a phase's name may begin near the right end
    y, ticks, marks = 0, {}, [("main", calls), ("stream", kernels)]
    for band in order:
        if marks and marks[0][0] in roles[band]:  # above the first of its kind
            y -= 2
            free = 0  # from here on there is no other text
            for phase, (start, end) in marks.pop(0)[1].items():
                axes.barh(y, end - start, 0.8, start, color=SHADES[phase])
                axes.text(max(start, free), y + 0.5, phase, fontsize=15, va="bottom")
                free = max(start, free) + width / 8
            y -= 1
        depths = bars([e for e in bands[band] if "ProfilerStep" not in e["name"]])
        for (depth, name), times in depths.items():
            shade, _ = KINDS[name]
            axes.broken_barh(times, (y - depth - 0.45, 0.9), color=shade, lw=0)
        deepest = max((depth for depth, _ in depths), default=0)
        ticks[y - deepest / 2] = f"{process}\n{roles[band]}"
        y -= deepest + 2
    axes.set_yticks(list(ticks), list(ticks.values()), fontsize=14)
    axes.tick_params("x", labelsize=14)
    axes.set_xlabel("ms since the start of the step", fontsize=15)
    axes.set(xlim=(0, width), ylim=(y + 1, 0))
    axes.spines[["top", "right"]].set_visible(False)
    for name, (shade, _) in KINDS.items():
        axes.barh(0, 0, color=shade, label=name)
    figure.legend(ncols=len(KINDS), loc="outside upper center", fontsize=14)
    figure.set_size_inches(13, 1.6 - 0.36 * y)
    figure.savefig(file, dpi=110)


def main():
    parser = OptionParser(__doc__)
    add = parser.add_argument
    add("file", nargs="?", type=Path, help="trace to read; default: the newest")
    add("--to", type=Path, default=Path("logs/trace.png"), help="PNG to write")
    args = parser.parse_args()
    names = "trace.json", "trace_rank0.json"
    files = [Path("logs/profiler", name) for name in names]
    files = [args.file] if args.file else [file for file in files if file.exists()]
    if not files:
        raise UserError(
            "no trace in logs/profiler/: type `bash run_single_cifar.sh`"
        )
    file = max(files, key=lambda file: args.file or file.stat().st_mtime)
    events, process = read_trace(file)
    args.to.parent.mkdir(parents=True, exist_ok=True)
    draw(events, process, args.to)
    print(f"Plot of {file} saved to {args.to}")


if __name__ == "__main__":
    main()
