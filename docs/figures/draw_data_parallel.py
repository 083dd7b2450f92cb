"""Draws a step of DataParallel, and one of DDP, to scale.

    python docs/figures/draw_data_parallel.py

Bytes and FLOPs are those that dp_ddp_intro/dp_by_hand.py counts.
"""

import sys
from itertools import accumulate

from matplotlib.figure import Figure
from torch.utils.flop_counter import FlopCounterMode

from figure_utils import COLOURS, REPOSITORY, save

sys.path.append(str(REPOSITORY / "dp_ddp_intro"))
from dp_by_hand import LINKS, PEAK, nets, size, step

FIRST_BUCKET, BUCKET = (
    2**20,
    25 * 2**20,
)  # bytes of gradients that DDP sends at a time


def data_parallel(work, copied, speed):
    """Return bars (words, start, seconds): one part begins when another one ends."""
    parts = {
        "weights out": copied["weights out"] / speed,
        "forward": work / 3,  # the backward pass is twice the arithmetic
        "logits": 2 * copied["logits back"] / speed,  # and their gradients
        "backward": work * 2 / 3,
        "gradients back": copied["gradients of the weights back"] / speed,
    }
    starts = accumulate(parts.values(), initial=0)
    return list(zip(parts, starts, parts.values(), strict=False))


def ddp(work, gradients, speed):
    """Return the bars of DDP: a bucket goes as soon as its gradients are there."""
    forward, backward = work / 3, work * 2 / 3
    bars = [("forward", 0, forward), ("backward", forward, backward)]
    sent, link_free = 0, 0
    while sent < gradients:
        bucket = min(BUCKET if sent else FIRST_BUCKET, gradients - sent)
        sent += bucket
        start = max(link_free, forward + backward * sent / gradients)
        bars.append(("", start, bucket / speed))
        link_free = start + bucket / speed
    return bars


def draw_bars(axes, bars):
    """Draw what GPUs compute above what they send, and when the step ends."""
    for words, start, seconds in bars:
        y = 1 if words in ("forward", "backward") else 0
        left, width = 1000 * start, 1000 * seconds
        axes.barh(y, width, 0.8, left, color=COLOURS[1 - y], edgecolor="white")
        if width > 2:  # the words have room
            style = {"color": "white", "size": 12, "ha": "center", "va": "center"}
            axes.text(left + width / 2, y, words, **style)
    end = 1000 * max(start + seconds for _, start, seconds in bars)
    axes.text(end + 0.3, 0.5, f"{end:.0f} ms", size=14, weight="bold", va="center")
    axes.set_yticks([0, 1], ["PCIe 4", "both GPUs"])
    axes.spines[["top", "right"]].set_visible(False)


def main():
    model, inputs, targets = nets()["transformer"]
    with FlopCounterMode(display=False) as counter:
        _, copied = step(model, inputs, targets)
    work, speed = counter.get_total_flops() / 2 / PEAK, LINKS["PCIe 4"]
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    upper, lower = figure.subplots(2, sharex=True)
    draw_bars(upper, data_parallel(work, copied, speed))
    draw_bars(lower, ddp(work, size(model.parameters()), speed))
    upper.set_title("DataParallel")
    lower.set_title("DDP")
    lower.set(xlabel="milliseconds, calculated", xlim=(0, 41))
    save(figure, "dp_ddp_intro/img/data_parallel.png")


if __name__ == "__main__":
    main()
