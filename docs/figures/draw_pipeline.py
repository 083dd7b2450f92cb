"""When each GPU computes in GPipe, 1F1B and interleaved 1F1B.

    python docs/figures/draw_pipeline.py

Each GPU follows the order of torch.distributed.pipelining, and starts an operation
as soon as its input is there. A backward pass takes twice as long as a forward pass.
"""

from fractions import Fraction
from itertools import accumulate

from matplotlib.figure import Figure
from matplotlib.patches import Patch

from figure_utils import save
from palette import GREY, INDIGO, SAND

GPUS, MICRO_BATCHES = 4, 8
CHUNKS = {"GPipe": 1, "1F1B": 1, "interleaved 1F1B": 2}  # stages per GPU


def order_of(gpu, schedule, v):
    """Return the operations of a GPU: [("F" or "B", stage, micro-batch)]."""
    p, m = GPUS, MICRO_BATCHES
    # p micro-batches pass a stage, then the GPU's next stage.
    turns = [(i // p % v, i // (p * v) * p + i % p) for i in range(v * m)]
    forward = [("F", chunk * p + gpu, i) for chunk, i in turns]
    backward = [("B", (v - 1 - chunk) * p + gpu, i) for chunk, i in turns]
    warmup = p - 1 - gpu  # forward passes before they alternate
    if schedule == "GPipe":
        warmup = m
    elif v > 1:
        warmup = 2 * warmup + (v - 1) * p
    order = forward[:warmup]
    for pair in zip(forward[warmup:], backward, strict=False):
        order += pair
    return order + backward[v * m - warmup :]


def simulate(orders, v):
    """Return {operation: (start, end)} for the orders of all GPUs with v stages."""
    bars, last = {}, GPUS * v - 1
    for _ in range(GPUS * len(orders[0])):  # until nothing changes any more
        for order in orders:
            end = 0
            for kind, stage, i in order:
                needs = ("F", stage - 1, i)
                if kind == "B":  # the last stage needs the loss
                    needs = ("B", stage + 1, i) if stage < last else ("F", stage, i)
                start = max(end, bars.get(needs, (0, 0))[1])
                end = start + Fraction(1 if kind == "F" else 2, v)
                bars[kind, stage, i] = start, end
    return bars


def draw_schedule(axes, name, v):
    """Draw a lane for each stage, with a bar for each operation; name the bubble."""
    orders = [order_of(gpu, name, v) for gpu in range(GPUS)]
    bars = simulate(orders, v)
    for (kind, stage, i), (start, end) in bars.items():
        gpu = stage % GPUS
        lane = gpu + (stage // GPUS + 0.5) / v - 0.5
        colour, ink = (INDIGO, "white") if kind == "F" else (SAND, "black")
        # White over all lanes of the GPU: it is busy. What stays grey is the bubble.
        axes.barh(gpu, end - start, 0.92, start, color="white")
        axes.barh(lane, end - start, 0.92 / v, start, color=colour, ec="white")
        axes.text((start + end) / 2, lane, i, color=ink, ha="center", va="center")
    bubble = 1 - 3 * MICRO_BATCHES / max(end for _, end in bars.values())
    axes.set_title(name, loc="left", size=15, weight="bold")
    axes.set_title(f"bubble {bubble} = {float(bubble):.0%}", loc="right", size=13)
    names = []
    for gpu, order in enumerate(orders):
        held = max(accumulate(1 if kind == "F" else -1 for kind, *_ in order))
        names.append(f"GPU {gpu}, holds {held / v:g}")
    axes.set_yticks(range(GPUS), names, size=12)
    axes.set(ylim=(GPUS - 0.5, -0.5), xticks=[], facecolor=GREY, xmargin=0)


def main():
    figure = Figure(figsize=(10, 8), layout="constrained")
    panels = figure.subplots(3, sharex=True, height_ratios=[2, 2, 3])
    for axes, (name, v) in zip(panels, CHUNKS.items(), strict=True):
        draw_schedule(axes, name, v)
    swatches = {
        "forward": INDIGO,
        "backward": SAND,
        "bubble": GREY,
        "runs its other stage": "white",
    }
    patches = [
        Patch(label=name, fc=colour, ec="black") for name, colour in swatches.items()
    ]
    figure.legend(handles=patches, loc="outside upper center", ncols=4, fontsize=12)
    text = "time \u2192\nnumbers: micro-batches; "
    text += "holds: most micro-batches with activations on the GPU"
    panels[-1].set_xlabel(text, size=13)
    save(figure, "beyond_ddp/img/pipeline.png")


if __name__ == "__main__":
    main()
