"""What the figures of this folder share: colours, tables of GPUs, and PNG files."""

from io import BytesIO
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from PIL import Image

REPOSITORY = Path(__file__).resolve().parents[2]
# The colour-blind can tell these apart.
COLOURS = ["#4477aa", "#ee6677", "#228833", "#aa3377"]
WIDTH, LEFT, ROW, BOX = 10, 2.3, 0.48, 0.36  # inches; LEFT: of the GPUs' columns


def write(axes, x, y, words, size=13, **style):
    """Write words, their middle at x, y."""
    axes.text(x, y, words, size=size, ha="center", va="center", **style)


def draw_box(axes, x, y, width, **look):
    """Draw a box, its middle at x, y."""
    axes.add_patch(Rectangle((x - width / 2, y - BOX / 2), width, BOX, **look))


def draw_parts(axes, x, y, entry):
    """Draw the parts of a tensor: "A . / (B) ." has two rows of two parts.

    Parts in colour are held all the time, "(B)" for a moment, and "." never.
    """
    rows = entry.split("/")
    for i, row in enumerate(rows):
        parts = row.split()
        width = min(0.55, 1.7 / len(parts))
        for j, part in enumerate(parts):
            middle = x + (j + 0.5 - len(parts) / 2) * width
            height = y + (len(rows) / 2 - 0.5 - i) * BOX
            if part[0] in ".(":
                look, ink = {"fill": False, "linestyle": ":"}, "black"
            else:  # a letter has a colour of its own, a number that of its place
                number = "ABCD".index(part[0]) if part[0].isalpha() else j
                look, ink = {"facecolor": COLOURS[number]}, "white"
            draw_box(axes, middle, height, width, edgecolor="gray", **look)
            name = part.strip(".()")
            write(axes, middle, height, name, 15, color=ink, weight="bold")


def draw_entry(axes, x, y, width, entry):
    """Draw what a GPU holds (see above) or computes, or [what GPUs send]."""
    if entry.startswith("["):
        draw_box(axes, x, y, width - 0.2, facecolor="#eeeeee", edgecolor="black")
        write(axes, x, y, entry.strip("[]"))
    elif entry.startswith("GPU"):
        write(axes, x, y, entry, 18, weight="bold")
    elif all(len(part.strip("()")) < 3 for part in entry.split()):
        draw_parts(axes, x, y, entry)
    else:
        write(axes, x, y, entry)


def draw_table(text):
    """Return a figure of what GPUs hold, compute and send; time goes down.

    Each line of the text is a row: its label, and entries that share the width. A
    label with * begins a phase of the step.
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
    """Save a PNG of 256 colours, a third as large; file: from the repository."""
    pixels = BytesIO()
    figure.savefig(pixels, dpi=100, facecolor="white")
    image = Image.open(pixels).convert("RGB").quantize(256)
    image.save(REPOSITORY / file, optimize=True)
    print(f"Saved {file}")
