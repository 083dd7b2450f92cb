"""Which layers are whole on a GPU while FSDP computes.

    python docs/figures/draw_fsdp.py

Each GPU keeps a shard of each layer. A layer is gathered before it computes, and
freed after it. The times are made up.
"""

from matplotlib.figure import Figure

from figure_utils import WIDTH, hide_frame, save
from palette import CYAN, GREEN, GREY, INDIGO, SAND

LAYERS = 3


def draw_part(axes, time, layer, name, colour, ink="black"):
    axes.barh(-layer, 1, 0.8, time, color=colour, ec="white")
    place = {"ha": "center", "va": "center", "size": 11, "color": ink}
    axes.text(time + 0.5, -layer, name, **place)


def main():
    axes = Figure(figsize=(WIDTH, 2.9), layout="constrained").add_subplot()
    end = 2 * LAYERS + 3
    for layer in range(LAYERS):
        axes.barh(-layer, end, 0.5, 0, color=GREY, ec="white")
        axes.text(
            -0.1, -layer, f"layer {layer + 1}", size=13, ha="right", va="center"
        )
        draw_part(axes, layer, layer, "gather", CYAN)
        draw_part(axes, layer + 1, layer, "forward", INDIGO, "white")
        start = end - 2 - layer  # the last layer is the first one to go backward
        draw_part(axes, start - 1, layer, "gather", CYAN)
        draw_part(axes, start, layer, "backward", SAND)
        draw_part(axes, start + 1, layer, "reduce-\nscatter", GREEN, "white")
    text = "grey: only the GPU's shard is in memory; coloured: the whole layer, "
    axes.text(0, -LAYERS + 0.3, text + "or its gradients", size=12, va="center")
    axes.text(0, 0.7, "time \u2192", size=12)
    axes.set(xlim=(-1.1, end), ylim=(-LAYERS, 1))
    hide_frame(axes)
    save(axes.figure, "beyond_ddp/img/fsdp.png")


if __name__ == "__main__":
    main()
