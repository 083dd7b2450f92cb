"""A step of DataParallel and a step of DDP, drawn to scale.

    python docs/figures/draw_data_parallel.py

dp_ddp_intro/dp_by_hand.py counts the bytes and FLOPs.
"""

import sys
from itertools import accumulate

from matplotlib.figure import Figure
from torch.utils.flop_counter import FlopCounterMode

from figure_utils import REPOSITORY, save

sys.path.append(str(REPOSITORY / "dp_ddp_intro"))
from dp_by_hand import LINKS, PEAK, count_bytes, make_models, step

BUCKET = 25 * 2**20  # bytes, as in DDP
COMPUTE, SEND = "#332288", "#228833"


def data_parallel(work, copied, speed):
    """Return bars (name, start, seconds). A part begins when the last one ends."""
    parts = {
        "weights out": copied["weights out"] / speed,
        "forward": work / 3,  # the backward pass is twice the arithmetic
        "logits back,\ntheir gradients out": 2 * copied["logits back"] / speed,
        "backward": work * 2 / 3,
        "gradients back": copied["gradients of the weights back"] / speed,
    }
    starts = accumulate(parts.values(), initial=0)
    return [*zip(parts, starts, parts.values(), strict=False)]


def ddp(work, gradients, speed):
    """Return the bars of DDP, which sends a bucket once its gradients are ready."""
    forward, backward = work / 3, work * 2 / 3
    bars = [("forward", 0, forward), ("backward", forward, backward)]
    sent, link_free = 0, 0  # bytes; when the link is free
    while sent < gradients:
        bucket = min(BUCKET, gradients - sent)
        sent += bucket
        start = max(link_free, forward + backward * sent / gradients)
        name = "" if sent < gradients else "gradients,\none bar per bucket"
        bars.append((name, start, bucket / speed))
        link_free = start + bucket / speed
    return bars


def draw_bars(axes, title, bars):
    """Draw computation above communication, and when the step ends."""
    for name, start, seconds in bars:
        y = 1 if name in ("forward", "backward") else 0
        left, width = 1000 * start, 1000 * seconds
        axes.barh(y, width, 0.8, left, color=COMPUTE if y else SEND, ec="white")
        if width > 2:
            style = {"x": left + width / 2, "color": "white", "ha": "center"}
        else:  # too narrow
            style = {"x": left + width + 0.3}
        axes.text(y=y, s=name, size=13, va="center", **style)
    end = 1000 * max(start + seconds for _, start, seconds in bars)
    axes.text(end + 0.3, 0.5, f"{end:.0f} ms", size=15, weight="bold", va="center")
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_yticks([0, 1], ["PCIe 4", "both GPUs"], size=13)
    axes.set_title(title, loc="left", size=15, weight="bold")


def main():
    model, inputs, targets = make_models()["transformer"]
    with FlopCounterMode(display=False) as counter:
        _, copied = step(model, inputs, targets)
    work, speed = counter.get_total_flops() / 2 / PEAK, LINKS["PCIe 4"]
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    upper, lower = figure.subplots(2, sharex=True)
    draw_bars(upper, "DataParallel", data_parallel(work, copied, speed))
    draw_bars(lower, "DDP", ddp(work, count_bytes(model.parameters()), speed))
    lower.set_xlabel("milliseconds, calculated", size=13)
    lower.set_xlim(0, 41)
    save(figure, "dp_ddp_intro/img/data_parallel.png")


if __name__ == "__main__":
    main()
