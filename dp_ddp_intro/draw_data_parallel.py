"""Draws img/data_parallel.png: a step of DataParallel, and one of DDP, to scale.

python draw_data_parallel.py
"""

from pathlib import Path

from dp_by_hand import LINKS, PEAK, nets, size, step
from matplotlib.figure import Figure
from torch.utils.flop_counter import FlopCounterMode

from common.cli import OptionParser

COMPUTE, COPY = "#4477aa", "#ee6677"  # told apart by the colour-blind, too
BUCKETS = 1 * 2**20, 25 * 2**20  # DDP sends 1 MB of gradients, then 25 MB at a time
FILE = Path(__file__).parent / "img/data_parallel.png"


def data_parallel(work, copied, speed):
    """Return bars (lane, start, seconds, words), one part after the other."""
    out, back = copied["weights out"] / speed, copied["logits back"] / speed
    parts = [
        ("PCIe", out, "weights out"),
        ("GPUs", work / 3, "forward"),  # the backward pass is twice the arithmetic
        ("PCIe", 2 * back, ""),
        ("GPUs", work * 2 / 3, "backward"),
        ("PCIe", copied["gradients of the weights back"] / speed, "gradients back"),
    ]
    starts = [sum(seconds for _, seconds, _ in parts[:i]) for i in range(len(parts))]
    return [(p[0], start, *p[1:]) for start, p in zip(starts, parts, strict=True)]


def ddp(work, gradients, speed):
    """Return the bars of DDP: a bucket goes as soon as its gradients are there."""
    bars = [
        ("GPUs", 0, work / 3, "forward"),
        ("GPUs", work / 3, work * 2 / 3, "backward"),
    ]
    sent, free = 0, 0
    while sent < gradients:
        bucket = min(BUCKETS[sent > 0], gradients - sent)
        sent += bucket
        start = max(free, work / 3 + work * 2 / 3 * sent / gradients)
        free = start + bucket / speed
        bars.append(("PCIe", start, bucket / speed, ""))
    return bars


def main():
    OptionParser(__doc__).parse_args()
    model, inputs, targets = nets()["transformer"]
    with FlopCounterMode(display=False) as counter:
        _, copied = step(model, inputs, targets)
    work, speed = counter.get_total_flops() / 2 / PEAK, LINKS["PCIe 4"]
    both = {
        "DataParallel": data_parallel(work, copied, speed),
        "DDP": ddp(work, size(model.parameters()), speed),
    }
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    for axes, (name, bars) in zip(
        figure.subplots(2, sharex=True), both.items(), strict=True
    ):
        for lane, start, seconds, words in bars:
            y = ["PCIe", "GPUs"].index(lane)
            colour = COMPUTE if lane == "GPUs" else COPY
            place = (1000 * start, 1000 * seconds)
            axes.broken_barh(
                [place], (y - 0.4, 0.8), color=colour, edgecolor="white"
            )
            middle = place[0] + place[1] / 2
            axes.text(
                middle, y, words, color="white", size=12, ha="center", va="center"
            )
        end = 1000 * max(start + seconds for _, start, seconds, _ in bars)
        axes.text(
            end + 0.3, 0.5, f"{end:.0f} ms", size=14, weight="bold", va="center"
        )
        axes.set(yticks=[0, 1], yticklabels=["PCIe 4", "both GPUs"], title=name)
        axes.spines[["top", "right"]].set_visible(False)
    axes.set(xlabel="milliseconds, calculated", xlim=(0, 41))
    FILE.parent.mkdir(exist_ok=True)
    figure.savefig(FILE, dpi=100, facecolor="white")
    print(f"Drawing saved to {FILE}")


if __name__ == "__main__":
    main()
