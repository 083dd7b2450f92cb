"""Draws img/all_reduce.png: what all-reduce does to the gradients.

python draw_all_reduce.py
"""

from pathlib import Path

from matplotlib.figure import Figure

from common.cli import OptionParser

GRADIENTS = [[2, 0, 4], [4, 1, 0], [0, 2, 2]]  # of three weights, on three GPUs
MEANS = [sum(column) / len(column) for column in zip(*GRADIENTS, strict=True)]
COLOURS = ["#4477aa", "#ee6677", "#228833"]  # told apart by the colour-blind, too
MEAN_COLOUR = "#555555"
FILE = Path(__file__).parent / "img/all_reduce.png"


def cells(axes, x, y, values, colour):
    """Draw a row of numbers, a box each; x, y: the middle of the row."""
    for i, value in enumerate(values):
        box = {"boxstyle": "square,pad=0.3", "facecolor": colour, "linewidth": 0}
        place = x + 0.62 * (i - 1), y
        text = f"{value:g}".center(3)
        style = {"family": "monospace", "color": "white", "weight": "bold"}
        axes.text(*place, text, ha="center", va="center", size=17, bbox=box, **style)


def main():
    OptionParser(__doc__).parse_args()
    axes = Figure(figsize=(10, 6)).add_axes((0, 0, 1, 1))
    axes.set(xlim=(-1.8, 7.8), ylim=(-0.75, 5.2))
    axes.axis("off")
    centre = {"ha": "center", "va": "center"}
    for gpu, (gradients, colour) in enumerate(zip(GRADIENTS, COLOURS, strict=True)):
        x = 2.8 * gpu + 0.9
        title = {"size": 20, "weight": "bold", "color": colour}
        axes.text(x, 4.85, f"GPU {gpu}", **title, **centre)
        axes.text(x, 4.35, "its share of the batch", size=13, **centre)
        cells(axes, x, 3.45, gradients, colour)
        cells(axes, x, 1.15, MEANS, MEAN_COLOUR)
        for start, end in ((4.15, 3.85), (3.05, 2.7), (1.9, 1.55), (0.75, 0.4)):
            arrow = {"arrowstyle": "-|>", "linewidth": 2, "color": "black"}
            axes.annotate("", (x, end), (x, start), arrowprops=arrow)
        axes.text(x, 0.1, "optimizer step", size=13, **centre)
        axes.text(x, -0.35, "the same weights", size=13, **centre)
    bar = {"boxstyle": "round,pad=0.5", "facecolor": "#eeeeee", "edgecolor": "black"}
    words = "all-reduce: add up over the GPUs, divide by their number".center(78)
    axes.text(3.7, 2.3, words, size=16, bbox=bar, **centre)
    for y, words in ((3.45, "own\ngradients"), (1.15, "mean\ngradients")):
        axes.text(-1.1, y, words, size=14, **centre)
    FILE.parent.mkdir(exist_ok=True)
    axes.figure.savefig(FILE, dpi=100, facecolor="white")
    print(f"Drawing saved to {FILE}")


if __name__ == "__main__":
    main()
