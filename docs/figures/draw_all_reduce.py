"""What dist.all_reduce() does with the sums of two ranks.

python docs/figures/draw_all_reduce.py
"""

from matplotlib.figure import Figure

from figure_utils import WIDTH, draw_cells, hide_frame, save
from palette import GREEN, GREY, INDIGO

NAMES = "loss", "correct", "count"
SUMS = [41.5, 55, 64], [38.5, 61, 64]  # of two ranks, made up


def main():
    axes = Figure(figsize=(WIDTH, 2.6), layout="constrained").add_subplot()
    total = [f"{sum(column):g}" for column in zip(*SUMS, strict=True)]
    for rank, (sums, colour) in enumerate(zip(SUMS, (INDIGO, GREEN), strict=True)):
        y = 1 - rank
        axes.text(-0.2, y, f"rank {rank}", size=13, ha="right", va="center")
        draw_cells(axes, 0, y, [f"{value:g}" for value in sums], colour)
        draw_cells(axes, 5, y, total, GREY)
    for left, title in ((0, "before"), (5, "after: the same on all ranks")):
        axes.text(left, 2.1, title, size=13, weight="bold")
        for n, name in enumerate(NAMES):
            axes.text(left + n + 0.5, 1.6, name, size=12, ha="center")
    axes.annotate("", (4.8, 0.5), (3.2, 0.5), arrowprops={"width": 3, "color": GREY})
    axes.text(4, 0.7, "sum", size=13, ha="center")
    axes.set(xlim=(-1.2, 8.2), ylim=(-0.6, 2.5))
    hide_frame(axes)
    save(axes.figure, "dp_ddp_intro/img/all_reduce.png")


if __name__ == "__main__":
    main()
