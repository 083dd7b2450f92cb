"""When each GPU computes in GPipe, 1F1B and interleaved 1F1B.

    python docs/figures/draw_pipeline.py

Each GPU follows the order of torch.distributed.pipelining, and starts an operation
as soon as its input is there.
"""

from fractions import Fraction
from functools import cache

from matplotlib.figure import Figure
from matplotlib.patches import Patch

from figure_utils import save

GPUS, MICRO_BATCHES = 4, 8
CHUNKS = {"GPipe": 1, "1F1B": 1, "interleaved 1F1B": 2}  # stages per GPU
DURATION = {"F": 1, "B": 2}  # of a pass through all stages of a GPU
COLOURS = {"F": "#4477aa", "B": "#eedd88", "bubble": "#aaaaaa"}
INK = {"F": "white", "B": "black"}


def order_of(gpu, schedule, p=GPUS, m=MICRO_BATCHES, v=1):
    """Return the operations of a GPU with v stages: [(kind, stage, micro-batch)].

    p: GPUs; m: micro-batches; kind: "F" or "B", forward or backward pass.
    """
    # p micro-batches pass a stage, then the GPU's next stage.
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
    """Return {operation: (start, end)} for the orders of all GPUs."""
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
        elif kind == "B":  # needs the loss
            waits_for.append(("F", stage, i))
        start = max((times(other)[1] for other in waits_for), default=0)
        return start, start + Fraction(DURATION[kind] * len(orders), last + 1)

    return {operation: times(operation) for order in orders for operation in order}


def bubble(orders):
    """Return the fraction of the time in which the GPUs wait."""
    bars = simulate(orders).values()
    busy = sum(end - start for start, end in bars)
    return 1 - busy / len(orders) / max(end for _, end in bars)


def held_activations(order, v):
    """Return the most micro-batches whose activations a GPU holds at once."""
    held = [0]
    for kind, _, _ in order:
        held.append(held[-1] + (1 if kind == "F" else -1))
    return Fraction(max(held), v)


def draw_schedule(axes, name, v):
    """Draw a lane for each stage, with a bar for each operation; name the bubble."""
    orders = [order_of(gpu, name, v=v) for gpu in range(GPUS)]
    for (kind, stage, i), (start, end) in simulate(orders).items():
        gpu, chunk = stage % GPUS, stage // GPUS
        middle = gpu + (chunk + 0.5) / v - 0.5  # of the lane
        # White over all lanes of the GPU: it is busy. What stays grey is the bubble.
        axes.barh(gpu, end - start, 0.92, start, color="white")
        axes.barh(
            middle, end - start, 0.92 / v, start, color=COLOURS[kind], ec="white"
        )
        style = {"size": 11, "ha": "center", "va": "center", "color": INK[kind]}
        axes.text((start + end) / 2, middle, i, **style)
    share = bubble(orders)
    axes.set_title(name, loc="left", size=15, weight="bold")
    axes.set_title(f"bubble {share} = {float(share):.0%}", loc="right", size=13)
    ticks, names = [], []
    for gpu, order in enumerate(orders):
        for chunk in range(v):
            ticks.append(gpu + (chunk + 0.5) / v - 0.5)
            stage = f"   stage {chunk * GPUS + gpu}" if v > 1 else ""
            held = f"GPU {gpu}, holds {float(held_activations(order, v)):g}"
            names.append(stage if chunk else held + stage)
    axes.set_yticks(ticks, names, size=12)
    axes.set_ylim(GPUS - 0.5, -0.5)
    axes.margins(x=0)
    axes.set(xticks=[], facecolor=COLOURS["bubble"])


def main():
    figure = Figure(figsize=(10, 8), layout="constrained")
    ratios = [1 + v for v in CHUNKS.values()]
    panels = figure.subplots(len(CHUNKS), sharex=True, height_ratios=ratios)
    for axes, (name, v) in zip(panels, CHUNKS.items(), strict=True):
        draw_schedule(axes, name, v)
    text = "time \u2192\nnumbers: micro-batches; "
    text += "holds: most micro-batches with activations on the GPU"
    panels[-1].set_xlabel(text, size=13)
    names = {"F": "forward", "B": "backward", "bubble": "bubble"}
    patches = [Patch(color=COLOURS[kind], label=names[kind]) for kind in names]
    other = Patch(fc="white", ec="gray", label="GPU runs its other stage")
    figure.legend(
        handles=[*patches, other], ncols=4, loc="outside lower center", fontsize=13
    )
    save(figure, "beyond_ddp/img/pipeline.png")


if __name__ == "__main__":
    main()
