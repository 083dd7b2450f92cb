"""A step of DataParallel and a step of DDP, drawn to scale.

    python docs/figures/draw_data_parallel.py

dp_ddp_intro/dp_by_hand.py counts the bytes and FLOPs.
"""

import sys
from itertools import accumulate

from matplotlib.figure import Figure
from torch.utils.flop_counter import FlopCounterMode

from figure_utils import REPOSITORY, save
from palette import GREEN, INDIGO

sys.path.append(str(REPOSITORY / "dp_ddp_intro"))
from dp_by_hand import LINKS, PEAK, count_bytes, make_models, step

BUCKET = 25 * 2**20  # bytes, as in DDP
COLOURS = GREEN, INDIGO  # of PCIe, of the GPUs


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
    link_free = 0  # when it is
    for sent in range(0, gradients, BUCKET):
        bucket = min(BUCKET, gradients - sent)
        start = max(link_free, forward + backward * (sent + bucket) / gradients)
        link_free = start + bucket / speed
        bars.append(("", start, bucket / speed))
    return [*bars, ("gradients,\none bar per bucket", link_free, 0)]


def draw_bars(axes, title, bars):
    """Draw computation above communication, and when the step ends."""
    for name, start, seconds in bars:
        y = 1 if name in ("forward", "backward") else 0
        left, width = 1000 * start, 1000 * seconds
        bar = axes.barh(y, width, 0.8, left, color=COLOURS[y], ec="white")
        place, ink = ("center", "white") if width > 2 else ("edge", "black")
        axes.bar_label(bar, [name], label_type=place, color=ink, size=13, padding=4)
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
