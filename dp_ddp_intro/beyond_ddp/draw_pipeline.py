"""Draws img/pipeline.png: who computes when in GPipe, 1F1B and interleaved 1F1B.

    python beyond_ddp/draw_pipeline.py

Each GPU has its list of things to do, in the order of torch.distributed.pipelining,
and does the next one as soon as its input is there.
"""

from fractions import Fraction

from matplotlib.patches import Rectangle

from boxes import COLOURS, canvas, save, write
from common.cli import OptionParser

GPUS, MICRO_BATCHES, CHUNKS = 4, 8, 2  # p, m, and v of the interleaved schedule
FORWARD, BACKWARD, BUBBLE = COLOURS[0], "#ccbb44", "#dddddd"
SECOND = {FORWARD: "#b5cce3", BACKWARD: "#f1e9a8"}  # of the second chunk: light
WIDE, LEFT = 0.273, 0.78  # inches: of a micro-batch's forward pass; GPUs' names


def gpipe(gpu, p, m):
    """Return what a GPU does: (kind, chunk, micro-batch), one after the other."""
    return [(kind, 0, i) for kind in "FB" for i in range(m)]


def one_f_one_b(gpu, p, m, v=1):
    """Return the same for 1F1B; with v chunks per GPU it is interleaved."""
    first = (v - 1) * p + (2 if v > 1 else 1) * (p - 1 - gpu)  # of forward alone
    first = min(first, v * m)
    # p micro-batches go through a chunk, then through the next one.
    turns = [(i // p % v, i // (p * v) * p + i % p) for i in range(v * m)]
    forward = [("F", chunk, i) for chunk, i in turns]
    backward = [("B", v - 1 - chunk, i) for chunk, i in turns]
    steady = zip(forward[first:], backward, strict=False)
    todo = forward[:first] + [work for both in steady for work in both]
    return todo + backward[v * m - first :]


def simulate(orders, v=1):
    """Return bars (gpu, start, end, kind, chunk, micro-batch); orders: for each GPU.

    A GPU's part of the forward pass takes 1, of the backward pass 2; a chunk 1/v.
    """
    p = len(orders)
    todo, free, ends, bars = [list(order) for order in orders], [0] * p, {}, []
    while any(todo):
        before = len(bars)
        for gpu, order in enumerate(todo):
            while order:
                kind, chunk, i = order[0]
                stage = chunk * p + gpu
                needs = ("F", stage - 1, i) if kind == "F" else ("B", stage + 1, i)
                if kind == "B" and stage == v * p - 1:
                    needs = "F", stage, i  # where the loss is
                if needs[1] >= 0 and needs not in ends:
                    break
                start = max(free[gpu], ends.get(needs, 0))
                end = start + Fraction(1 if kind == "F" else 2, v)
                free[gpu] = ends[kind, stage, i] = end
                bars.append((gpu, start, end, *order.pop(0)))
        if len(bars) == before:
            raise RuntimeError("all wait for each other")
    return bars


def bubble(bars):
    """Return the share of the time in which a GPU waits."""
    whole = max(end for _, _, end, *_ in bars) * (1 + max(bar[0] for bar in bars))
    return 1 - sum(end - start for _, start, end, *_ in bars) / whole


def held(bars, gpu, v=1):
    """Return for how many micro-batches a GPU holds its activations, at most."""
    most = now = 0
    for _, _, _, kind, *_ in sorted(bar for bar in bars if bar[0] == gpu):
        now += Fraction(1 if kind == "F" else -1, v)
        most = max(most, now)
    return most


def schedules(p=GPUS, m=MICRO_BATCHES, v=CHUNKS):
    """Return {name: (bars, chunks per GPU)}."""
    lists = {
        "GPipe": ([gpipe(gpu, p, m) for gpu in range(p)], 1),
        "1F1B": ([one_f_one_b(gpu, p, m) for gpu in range(p)], 1),
        "interleaved 1F1B": ([one_f_one_b(gpu, p, m, v) for gpu in range(p)], v),
    }
    return {name: (simulate(todo, n), n) for name, (todo, n) in lists.items()}


def block(axes, left, y, width, colour, words="", size=0.26):
    look = {"facecolor": colour, "edgecolor": "white", "linewidth": 0.7}
    axes.add_patch(Rectangle((left, y - size / 2), width, size, **look))
    ink = "white" if colour == FORWARD else "black"
    write(axes, left + width / 2, y - 0.01, words, color=ink)


def pipeline():
    axes, y = canvas(), 5.45
    p, m = GPUS, MICRO_BATCHES
    right = LEFT + WIDE * 3 * (m + p - 1)  # where GPipe ends
    title = f"p = {p} GPUs, each with 1/{p} of the layers;  m = {m} micro-batches"
    write(axes, 5, 5.8, title, 15, weight="bold")
    for name, (bars, v) in schedules().items():
        share, end = bubble(bars), max(bar[2] for bar in bars)
        form = "(p-1) / (m+p-1)" if v == 1 else f"(p-1) / (vm+p-1), v = {v} chunks"
        words = f"bubble {form}: {share} = {float(share):.0%}".replace("-", "\u2212")
        write(axes, 0.1, y, name, 15, ha="left", weight="bold")
        write(axes, right, y, words, ha="right")
        for gpu in range(p):
            y -= 0.28
            write(axes, 0.1, y, f"GPU {gpu}", ha="left")
            block(axes, LEFT, y, WIDE * end, BUBBLE)
            for _, start, stop, kind, chunk, i in (b for b in bars if b[0] == gpu):
                colour = FORWARD if kind == "F" else BACKWARD
                colour = SECOND[colour] if chunk else colour
                place = LEFT + WIDE * start, y, WIDE * (stop - start)
                block(axes, *place, colour, i)
        most = [f"GPU {gpu}: {float(held(bars, gpu, v)):g}" for gpu in range(p)]
        words = "most activations held at once, in micro-batches:   "
        write(axes, LEFT, y - 0.29, words + ",  ".join(most), ha="left")
        y -= 0.62
    names = {"forward": FORWARD, "backward": BACKWARD, "bubble": BUBBLE}
    for i, (words, colour) in enumerate(names.items()):
        left = LEFT + 1.65 * i
        block(axes, left, 0.2, 0.27, colour, 0 if i < 2 else "")
        write(axes, left + 0.37, 0.2, words, ha="left")
    for i, colour in enumerate(SECOND.values()):
        block(axes, LEFT + 4.95 + 0.3 * i, 0.2, 0.27, colour, 0)
    write(axes, LEFT + 5.6, 0.2, "light: second chunk", ha="left")
    write(axes, right, 0.2, "time \u2192", ha="right")
    return axes


def main():
    OptionParser(__doc__).parse_args()
    save({"pipeline.png": pipeline()})


if __name__ == "__main__":
    main()
