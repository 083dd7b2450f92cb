"""Draws zero.png, fsdp.png and hsdp.png in img/: who holds and who sends what.

python beyond_ddp/draw_shards.py
"""

from boxes import arrow, bar, canvas, cells, frame, save, write
from common.cli import OptionParser

HELD = "weights", "gradients", "optimizer state"
LEFT, RIGHT = 1.75, 9.9  # inches: where the GPUs' columns begin and end


def column(gpu, gpus):
    """Return the middle of a GPU's column."""
    return LEFT + (gpu + 0.5) * (RIGHT - LEFT) / gpus


def name(axes, y, words):
    write(axes, LEFT - 0.13, y, words, ha="right")


def part(axes, y, words, top=0.3):
    """Begin a part of the step: a line, and what the part is called."""
    axes.plot([0.1, 9.9], [y + top, y + top], color="#aaaaaa", linewidth=1)
    write(axes, 0.1, y, words, 15, ha="left", weight="bold")


def table(axes, title, y, gpus, parts, cut):
    """Draw what each GPU holds all the time; cut: what it holds only its part of."""
    write(axes, 0.1, 5.72, title, 20, ha="left", weight="bold")
    for gpu in range(gpus):
        x = column(gpu, gpus)
        write(axes, x, y, f"GPU {gpu}", 18, weight="bold")
        for i, words in enumerate(HELD):
            own = gpu % len(parts) if words in cut else None
            cells(axes, x, y - 0.42 - 0.38 * i, parts, own)
    for i, words in enumerate(HELD):
        name(axes, y - 0.42 - 0.38 * i, words)


def zero():
    axes = canvas()
    table(axes, "ZeRO-1", 5.72, 3, "ABC", ["optimizer state"])
    part(axes, 3.93, "forward")
    part(axes, 3.3, "backward")
    bar(axes, LEFT, RIGHT, 3.3, "all-reduce: the mean of the gradients, as in DDP")
    part(axes, 2.67, "step")
    words = "broadcast: each sends the weights that it has stepped to all"
    bar(axes, LEFT, RIGHT, 1.34, words)
    name(axes, 2.16, "weights")
    name(axes, 0.52, "weights")
    for gpu in range(3):
        x = column(gpu, 3)
        write(axes, x, 3.93, "its share of the batch")
        write(axes, x, 2.67, f"steps its part, {'ABC'[gpu]}")
        stepped = ["ABC"[i] + "\u2032" * (i == gpu) for i in range(3)]
        cells(axes, x, 2.16, stepped)
        arrow(axes, (x, 1.92), (x, 1.6))
        arrow(axes, (x, 1.09), (x, 0.77))
        cells(axes, x, 0.52, ["A\u2032", "B\u2032", "C\u2032"])
    return axes


def fsdp():
    axes = canvas()
    table(axes, "FSDP", 5.72, 3, "ABC", HELD)
    part(axes, 3.97, "forward")
    bar(axes, LEFT, RIGHT, 3.97, "all-gather: the layer's weights, freed after use")
    name(axes, 3.5, "a layer's\nweights")
    part(axes, 2.57, "backward")
    bar(axes, LEFT, RIGHT, 2.57, "all-gather: the layer's weights, once more")
    name(axes, 2.1, "its gradients")
    words = "reduce-scatter: to each its part of the mean of the gradients"
    bar(axes, LEFT, RIGHT, 1.63, words)
    name(axes, 1.16, "gradients")
    part(axes, 0.6, "step")
    write(axes, (LEFT + RIGHT) / 2, 0.2, "nothing is sent")
    for gpu in range(3):
        x = column(gpu, 3)
        cells(axes, x, 3.5, "ABC")
        write(axes, x, 3.1, "its share of the batch")
        cells(axes, x, 2.1, "ABC")
        cells(axes, x, 1.16, "ABC", gpu)
        write(axes, x, 0.6, f"steps its part, {'ABC'[gpu]}")
    return axes


def hsdp():
    axes = canvas()
    for node in range(2):
        left = LEFT + node * (RIGHT - LEFT) / 2
        right = left + (RIGHT - LEFT) / 2
        frame(axes, left + 0.05, 0.1, right - 0.05, 5.95)
        write(axes, (left + right) / 2, 5.72, f"node {node}", 15)
        words = "all-gather: a layer's weights"
        bar(axes, left + 0.2, right - 0.2, 3.55, words)
        bar(axes, left + 0.2, right - 0.2, 2.92, words)
        bar(axes, left + 0.2, right - 0.2, 2.42, "reduce-scatter: its gradients")
        write(axes, (left + right) / 2, 0.32, "nothing is sent")
    table(axes, "HSDP", 5.35, 4, "AB", HELD)
    part(axes, 3.55, "forward")
    part(axes, 2.92, "backward")
    name(axes, 1.72, "gradients")
    part(axes, 0.72, "step")
    for gpu, y in ((0, 1.94), (1, 1.4)):
        ends = column(gpu, 4), column(gpu + 2, 4)
        for end in ends:
            cells(axes, end, y, "AB", gpu)
        arrow(axes, (ends[0] + 0.62, y), (ends[1] - 0.62, y), "<|-|>")
        words = f"all-reduce: {'AB'[gpu]}"
        bar(axes, ends[0] + 1.05, ends[1] - 1.05, y, words)
    for gpu in range(4):
        write(axes, column(gpu, 4), 0.72, f"steps its {'AB'[gpu % 2]}")
    return axes


def main():
    OptionParser(__doc__).parse_args()
    save({"zero.png": zero(), "fsdp.png": fsdp(), "hsdp.png": hsdp()})


if __name__ == "__main__":
    main()
