"""Colours, tables of GPUs, and PNG files for the figures of this folder."""

from io import BytesIO
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from PIL import Image

REPOSITORY = Path(__file__).resolve().parents[2]
# Dark to light, so that they differ in grey print. {colour: colour of text on it}
COLOURS = {
    "#332288": "white",
    "#228833": "white",
    "#ee8866": "black",
    "#eedd88": "black",
}
# In inches. The columns of the GPUs begin at LEFT.
WIDTH, LEFT, ROW, BOX = 10, 2.3, 0.48, 0.36


def write(axes, x, y, text, size=13, **style):
    """Write a text centred at x, y."""
    axes.text(x, y, text, size=size, ha="center", va="center", **style)


def draw_box(axes, x, y, width, **style):
    """Draw a box centred at x, y."""
    axes.add_patch(Rectangle((x - width / 2, y - BOX / 2), width, BOX, **style))


def draw_shards(axes, x, y, entry):
    """Draw the shards of a tensor: "A . / (B) ." has two rows of two shards.

    A GPU holds coloured shards all the time, "(B)" for a while, and "." never.
    """
    rows = entry.split("/")
    for i, row in enumerate(rows):
        shards = row.split()
        width = min(0.55, 1.7 / len(shards))
        for j, shard in enumerate(shards):
            middle = x + (j + 0.5 - len(shards) / 2) * width
            height = y + (len(rows) / 2 - 0.5 - i) * BOX
            if shard[0] in ".(":
                style, ink = {"fill": False, "linestyle": ":"}, "black"
            else:  # the colour of a letter is fixed; numbers are coloured in order
                number = "ABCD".index(shard[0]) if shard[0].isalpha() else j
                colour, ink = list(COLOURS.items())[number]
                style = {"facecolor": colour}
            draw_box(axes, middle, height, width, edgecolor="gray", **style)
            name = shard.strip(".()")
            write(axes, middle, height, name, 15, color=ink, weight="bold")


def draw_entry(axes, x, y, width, entry):
    """Draw a GPU's shards, [a collective], or a text such as what a GPU computes."""
    if entry.startswith("["):
        draw_box(axes, x, y, width - 0.2, facecolor="#eeeeee", edgecolor="black")
        write(axes, x, y, entry.strip("[]"))
    elif entry.startswith("GPU"):
        write(axes, x, y, entry, 18, weight="bold")
    elif all(len(part.strip("()")) < 3 for part in entry.split()):
        draw_shards(axes, x, y, entry)
    else:
        write(axes, x, y, entry)


def draw_table(text):
    """Return a figure of what GPUs hold, compute and send. Time goes down.

    Each line of the text is a row: a label, and entries of equal width. A label with
    * begins a phase of the step.
    """
    rows = [line.split("|") for line in text.strip().splitlines()]
    depths = [ROW * (1 + 0.75 * row[1].count("/")) for row in rows]
    height = sum(depths) + 0.2
    axes = Figure(figsize=(WIDTH, height)).add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, WIDTH), ylim=(0, height))
    axes.axis("off")
    top = height - 0.1
    for (label, *entries), depth in zip(rows, depths, strict=True):
        y = top - depth / 2
        style = {"x": LEFT - 0.1, "ha": "right", "size": 13}
        if label.startswith("*"):
            axes.plot([0.1, WIDTH - 0.1], [top, top], color="#aaaaaa", linewidth=1)
            style = {"x": 0.1, "ha": "left", "size": 15, "weight": "bold"}
        axes.text(y=y, s=label.strip(" *"), va="center", **style)
        width = (WIDTH - LEFT) / len(entries)
        for column, entry in enumerate(entries):
            x = LEFT + (column + 0.5) * width
            draw_entry(axes, x, y, width, entry.strip())
        top -= depth
    return axes.figure


def save(figure, file):
    """Save a PNG of 256 colours, a third as large; file: path in the repository."""
    pixels = BytesIO()
    figure.savefig(pixels, dpi=100, facecolor="white")
    image = Image.open(pixels).convert("RGB").quantize(256)
    image.save(REPOSITORY / file, optimize=True)
    print(f"Saved {file}")
