"""Draws tensor_parallel.png and fsdp_tp.png in img/: each matrix cut in two.

python beyond_ddp/draw_tensor_parallel.py
"""

from boxes import COLOURS, arrow, bar, box, canvas, frame, save, write
from common.cli import OptionParser

ROWS = 3.95, 2.25  # inches: the middles of GPU 0 and GPU 1
SIDE = 1.0  # of a matrix


def matrix(axes, x, y, across, down, own, side=SIDE):
    """Draw a matrix in so many columns and rows; own: its parts.

    own: {(column, row): (words, colour)}; a part without a colour is dashed.
    """
    width, height = side / across, side / down
    for i in range(across):
        for j in range(down):
            left, top = x - side / 2 + i * width, y + side / 2 - j * height
            place = left + width / 2, top - height / 2, width - 0.02, height - 0.02
            box(axes, *place, *own.get((i, j), ("", None)))


def half(axes, left, title, names, between):
    """Draw half of a block: one matrix's columns, then the next one's rows."""
    first, second, middle = left + 1.22, left + 2.92, sum(ROWS) / 2
    write(axes, left + 2.07, 5.33, title, 18, weight="bold")
    for x, name, cut in (
        (first, names[0], "columns (outputs)"),
        (second, names[1], "rows (inputs)"),
    ):
        write(axes, x, 4.97, name, 15, weight="bold")
        write(axes, x, 4.68, cut)
    for gpu, y in enumerate(ROWS):
        matrix(axes, first, y, 2, 1, {(gpu, 0): ("", COLOURS[gpu])})
        matrix(axes, second, y, 1, 2, {(0, gpu): ("", COLOURS[gpu])})
        for start, end in ((-0.06, 0.12), (0.5, 0.7), (1.74, 2.4), (3.44, 3.64)):
            arrow(axes, (left + start, y), (left + end, y))
        arrow(axes, (left + 4.02, y), (left + 4.2, y))
        write(axes, left + 2.07, y + 0.24, between)
        box(axes, left - 0.2, y, 0.26, SIDE, "x", "#555555")
    words = "all-reduce, backward", "all-reduce, forward"
    bar(axes, left + 0.12, left + 0.5, middle, words[0], 2.75, linestyle="--")
    bar(axes, left + 3.64, left + 4.02, middle, words[1], 2.75)


def tensor_parallel():
    axes = canvas()
    write(axes, 0.1, 5.72, "Tensor parallel", 20, ha="left", weight="bold")
    write(axes, 9.9, 5.72, "a block of the transformer", 15, ha="right")
    half(axes, 0.68, "attention", ("qkv", "proj"), "its\nheads")
    half(axes, 0.68 + 4.54, "MLP", ("mlp 1", "mlp 2"), "GELU")
    for gpu, y in enumerate(ROWS):
        write(axes, 0.1, y + 0.72, f"GPU {gpu}", ha="left", weight="bold")
        box(axes, 9.56, y, 0.26, SIDE, "x", "#555555")
    for y, words in (
        (0.95, "forward \u2192  all-reduce adds up the two GPUs' partial sums"),
        (0.6, "backward \u2190  all-reduce adds up the two GPUs' gradients of x"),
        (0.25, "whole on both GPUs: x, LayerNorm; cut in two: the four matrices"),
    ):
        write(axes, 0.1, y, words, 14, ha="left")
    return axes


def fsdp_tp():
    """Draw four GPUs: TP in each row, FSDP in each column."""
    axes = canvas()
    write(axes, 0.1, 5.72, "FSDP + TP", 20, ha="left", weight="bold")
    rows, columns = (4.3, 1.1), (3.05, 8.45)  # middles of the GPUs' frames
    for share, y in enumerate(rows):
        write(axes, 0.75, y, f"share {share}\nof the\nbatch")
        for tp, x in enumerate(columns):
            gpu, other = 2 * share + tp, 2 * (1 - share) + tp
            own, borrowed = (str(gpu), COLOURS[gpu]), (str(other), None)
            frame(axes, x - 1.45, y - 0.95, x + 1.45, y + 0.95)
            write(axes, x, y + 0.72, f"GPU {gpu}", 18, weight="bold")
            held = {(2 * tp + share, 0): own, (2 * tp + 1 - share, 0): borrowed}
            matrix(axes, x - 0.7, y - 0.05, 4, 1, held)
            held = {(share, tp): own, (1 - share, tp): borrowed}
            matrix(axes, x + 0.7, y - 0.05, 2, 2, held)
            write(axes, x - 0.7, y - 0.75, "mlp 1")
            write(axes, x + 0.7, y - 0.75, "mlp 2")
        arrow(axes, (columns[0] + 1.5, y), (columns[1] - 1.5, y), "<|-|>")
        words = "TP: all-reduce\nof activations,\nof their gradients"
        bar(axes, columns[0] + 1.75, columns[1] - 1.75, y, words, 1.0)
    for x in columns:
        arrow(axes, (x, rows[0] - 1), (x, rows[1] + 1), "<|-|>")
        words = "FSDP: all-gather of weights,\nreduce-scatter of gradients"
        bar(axes, x - 1.35, x + 1.35, sum(rows) / 2, words, 0.65)
    words = "coloured: always there\nnumber alone: gathered\nwhile a layer needs it"
    write(axes, sum(columns) / 2, sum(rows) / 2, words)
    return axes


def main():
    OptionParser(__doc__).parse_args()
    save({"tensor_parallel.png": tensor_parallel(), "fsdp_tp.png": fsdp_tp()})


if __name__ == "__main__":
    main()
