"""How tensor parallelism splits two linear layers over two GPUs.

    python docs/figures/draw_tensor_parallel.py

The first is split by its output features (ColwiseParallel), the second by its input
features (RowwiseParallel), so that one all-reduce is enough for both.
"""

from matplotlib.figure import Figure

from figure_utils import WIDTH, hide_frame, save
from palette import GREEN, GREY, INDIGO


def draw_matrix(axes, left, bottom, width, height, colour, text):
    ink = "black" if colour == GREY else "white"
    axes.bar(
        left, height, width, bottom, align="edge", color=colour, ec="white", lw=2
    )
    place = {"ha": "center", "va": "center", "size": 12, "color": ink}
    axes.text(left + width / 2, bottom + height / 2, text, **place)


def main():
    axes = Figure(figsize=(WIDTH, 2.7), layout="constrained").add_subplot()
    for gpu, colour in enumerate((INDIGO, GREEN)):
        low = 1.7 * (1 - gpu)
        axes.text(-0.2, low + 0.75, f"GPU {gpu}", size=13, ha="right", va="center")
        draw_matrix(axes, 0, low + 0.25, 1.5, 1, GREY, "inputs")
        draw_matrix(axes, 1.9, low, 1.5, 1.5, colour, "half of\nlinear 1")
        draw_matrix(axes, 3.8, low + 0.25, 1.5, 1, colour, "half of\nfeatures")
        draw_matrix(axes, 5.7, low, 1.5, 1.5, colour, "half of\nlinear 2")
        draw_matrix(axes, 7.6, low + 0.25, 1.5, 1, colour, "its part\nof a sum")
        draw_matrix(axes, 10.8, low + 0.25, 1.5, 1, GREY, "outputs")
        for x, sign in ((1.7, "@"), (3.6, "="), (5.5, "@"), (7.4, "=")):
            axes.text(x, low + 0.75, sign, size=13, ha="center", va="center")
        arrow = {"width": 2, "headwidth": 8, "color": GREY}
        axes.annotate("", (10.7, low + 0.75), (9.2, low + 0.75), arrowprops=arrow)
        axes.text(9.95, low + 0.95, "all-reduce", size=12, ha="center")
    axes.set(xlim=(-1.3, 12.4), ylim=(-0.1, 3.3))
    hide_frame(axes)
    save(axes.figure, "beyond_ddp/img/tensor_parallel.png")


if __name__ == "__main__":
    main()
