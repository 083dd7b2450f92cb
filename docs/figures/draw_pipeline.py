"""Draws who computes when in GPipe, 1F1B and interleaved 1F1B.

    python docs/figures/draw_pipeline.py

Each GPU does its operations in the order of torch.distributed.pipelining, and starts
one as soon as its input is there.
"""

from fractions import Fraction
from functools import cache

from matplotlib.figure import Figure
from matplotlib.patches import Patch

from figure_utils import save

GPUS, MICRO_BATCHES = 4, 8
CHUNKS = {"GPipe": 1, "1F1B": 1, "interleaved 1F1B": 2}  # stages of each GPU
DURATION = {"F": 1, "B": 2}  # of a pass through all stages of a GPU
COLOURS = {  # of a GPU's first stage, and of its second
    "F": ("#4477aa", "#b5cce3"),
    "B": ("#ccbb44", "#f1e9a8"),
    "bubble": ("#dddddd",),
}


def order_of(gpu, schedule, p=GPUS, m=MICRO_BATCHES, v=1):
    """Return what a GPU does: [(kind, stage, micro-batch)], with v stages on it.

    p: GPUs; m: micro-batches; kind: "F" or "B", forward or backward pass.
    """
    # p micro-batches go through a stage, then through the GPU's next one.
    turns = [(i // p % v, i // (p * v) * p + i % p) for i in range(v * m)]
    forward = [("F", chunk * p + gpu, i) for chunk, i in turns]
    backward = [("B", (v - 1 - chunk) * p + gpu, i) for chunk, i in turns]
    warmup = p - 1 - gpu  # forward passes before they alternate
    if schedule == "GPipe":
        warmup = m
    elif v > 1:
        warmup = 2 * warmup + (v - 1) * p
    warmup = min(warmup, v * m)
    order = forward[:warmup]
    for pair in zip(forward[warmup:], backward, strict=False):
        order += pair
    return order + backward[v * m - warmup :]


def simulate(orders):
    """Return {operation: (start, end)} of all GPUs, whose orders are given."""
    last = max(stage for order in orders for _, stage, _ in order)
    previous = {}
    for order in orders:
        previous |= zip(order[1:], order, strict=False)

    @cache
    def times(operation):
        kind, stage, i = operation
        waits_for = [previous[operation]] if operation in previous else []
        if kind == "F" and stage > 0:
            waits_for.append(("F", stage - 1, i))
        elif kind == "B" and stage < last:
            waits_for.append(("B", stage + 1, i))
        elif kind == "B":  # the loss is there
            waits_for.append(("F", stage, i))
        start = max((times(other)[1] for other in waits_for), default=0)
        return start, start + Fraction(DURATION[kind] * len(orders), last + 1)

    return {operation: times(operation) for order in orders for operation in order}


def bubble(orders):
    """Return the share of the time in which the GPUs wait."""
    bars = simulate(orders).values()
    busy = sum(end - start for start, end in bars)
    return 1 - busy / len(orders) / max(end for _, end in bars)


def held_activations(order, v):
    """Return of how many micro-batches a GPU holds the activations, at most."""
    held = [0]
    for kind, _, _ in order:
        held.append(held[-1] + (1 if kind == "F" else -1))
    return Fraction(max(held), v)


def draw_schedule(axes, name, v):
    """Draw a bar for each operation, with its micro-batch, and name the bubble."""
    orders = [order_of(gpu, name, v=v) for gpu in range(GPUS)]
    for (kind, stage, i), (start, end) in simulate(orders).items():
        gpu, colour = stage % GPUS, COLOURS[kind][stage // GPUS]
        axes.barh(gpu, end - start, 0.9, start, color=colour, ec="white")
        axes.text((start + end) / 2, gpu, i, size=12, ha="center", va="center")
    share = bubble(orders)
    axes.set_title(name, loc="left", size=15, weight="bold")
    axes.set_title(f"bubble {share} = {float(share):.0%}", loc="right", size=13)
    held = [float(held_activations(order, v)) for order in orders]
    names = [f"GPU {gpu}, holds {most:g}" for gpu, most in enumerate(held)]
    axes.set_yticks(range(GPUS), names, size=13)
    axes.invert_yaxis()
    axes.margins(x=0)
    axes.set(xticks=[], facecolor=COLOURS["bubble"][0])


def main():
    figure = Figure(figsize=(10, 6.4), layout="constrained")
    panels = figure.subplots(len(CHUNKS), sharex=True)
    for axes, (name, v) in zip(panels, CHUNKS.items(), strict=True):
        draw_schedule(axes, name, v)
    words = "time \u2192   holds: the activations of so many micro-batches, at most"
    panels[-1].set_xlabel(words, size=13)
    names = {"F": "forward", "B": "backward", "bubble": "bubble"}
    patches = [Patch(color=COLOURS[kind][0], label=names[kind]) for kind in names]
    patches.append(
        Patch(color=COLOURS["F"][1], label="light: second stage of a GPU")
    )
    figure.legend(handles=patches, ncols=4, loc="outside lower center", fontsize=13)
    save(figure, "dp_ddp_intro/beyond_ddp/img/pipeline.png")


if __name__ == "__main__":
    main()
