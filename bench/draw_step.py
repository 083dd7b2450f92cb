"""Draws img/step.png: a step of DDP over 25 Gb/s Ethernet, as scaling.py has it.

python draw_step.py
"""

import json
from pathlib import Path

from matplotlib.figure import Figure
from predict import model_case
from scaling import BACKWARD, FIRST, GROUP, MB, read_net, step

from common.cli import OptionParser

HERE = Path(__file__).parent
COMPUTE, SEND, LATE = "#88bbee", "#bbbbbb", "#ee6677"  # for the colour-blind, too


def main():
    OptionParser(__doc__).parse_args()
    site = json.loads((HERE / "sites/workstations-25gbe.json").read_text())
    case = (
        {"fixed": 0}
        | model_case("resnet50", site, "fp16")
        | {
            "overlap": True,
            "accumulate": 1,
        }
    )
    work = 128 * case["each"]
    case |= {"group": GROUP * work, "loader": 1e9, "storage": 1e9}
    parts, buckets = step(8, 128, case, read_net(site))
    figure = Figure(figsize=(10, 3), layout="constrained")
    axes = figure.add_subplot(yticks=[0, 1], yticklabels=["GPU", "network"])

    def bar(lane, start, end, words, color):
        axes.barh(lane, end - start, 0.6, start, color=color, edgecolor="white")
        axes.text((start + end) / 2, lane, words, ha="center", va="center", size=9)

    work += parts["group"]  # which stretches it
    forward = (1 - BACKWARD) * work
    bar(0, 0, forward, "forward", COMPUTE)
    bar(0, forward, work, "backward", COMPUTE)
    for size, ready, begin, end in buckets:
        late = max(begin, work)  # of what ends after the backward pass
        words = f"{size / MB:.0f} MiB"
        bar(1, begin, min(end, late), words * (begin < work and size > FIRST), SEND)
        if end > late:
            bar(1, late, end, words * (begin >= work), LATE)
        axes.plot([ready, ready], [0.3, 0.7], "k:", linewidth=1)
    text = (
        "seconds; dotted: when a bucket's gradients are there; red: what sticks out"
    )
    axes.set_xlabel(text)
    axes.invert_yaxis()
    axes.set_title(
        "ResNet-50, 16 bits, 128 images a GPU, 8 GPUs on 25 Gb/s Ethernet"
    )
    file = HERE / "img/step.png"
    file.parent.mkdir(exist_ok=True)
    figure.savefig(file, dpi=100)
    print(f"Saved to {file}")


if __name__ == "__main__":
    main()
