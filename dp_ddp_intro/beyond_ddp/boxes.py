"""What the drawings of this folder are made of; all places are inches on 10 x 6."""

from io import BytesIO
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Rectangle
from PIL import Image

COLOURS = ["#4477aa", "#ee6677", "#228833", "#aa3377"]  # for the colour-blind, too
FOLDER = Path(__file__).parent / "img"


def canvas():
    axes = Figure(figsize=(10, 6)).add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, 10), ylim=(0, 6))
    axes.axis("off")
    return axes


def write(axes, x, y, words, size=13, **style):
    """Write words with their middle at x, y; ha="left": they begin at x."""
    place = {"ha": "center", "va": "center"} | style
    axes.text(x, y, words, size=size, **place)


def box(axes, x, y, width, height, words="", colour=None):
    """Draw a box, its middle at x, y; without a colour it is empty, and dashed."""
    look = {"facecolor": colour or "white", "edgecolor": "white"}
    if colour is None:
        look |= {"edgecolor": "#999999", "linestyle": (0, (3, 2))}
    axes.add_patch(Rectangle((x - width / 2, y - height / 2), width, height, **look))
    ink = "white" if colour else "black"
    write(axes, x, y - 0.01, words, 15, color=ink, weight="bold")


def cells(axes, x, y, words, own=None, width=0.55, height=0.34):
    """Draw a row of parts, its middle at x, y; with `own` only this one is there."""
    for i, word in enumerate(words):
        place = x + (width + 0.03) * (i - (len(words) - 1) / 2)
        held = own is None or i == own
        colour, word = (COLOURS[i], word) if held else (None, "")
        box(axes, place, y, width, height, word, colour)


def bar(axes, left, right, y, words, height=0.36, **style):
    """Draw what travels: from left to right, all GPUs in between take part."""
    look = {"facecolor": "#eeeeee", "edgecolor": "black", "linewidth": 1.2} | style
    shape = "round,pad=0,rounding_size=0.1"
    place = (left, y - height / 2)
    axes.add_patch(
        FancyBboxPatch(place, right - left, height, shape, zorder=4, **look)
    )
    turned = 90 if height > right - left else 0
    write(axes, (left + right) / 2, y, words, rotation=turned, zorder=5)


def arrow(axes, start, end, style="-|>", **look):
    look = {"linewidth": 2, "color": "black", "shrinkA": 0, "shrinkB": 0} | look
    axes.annotate("", end, start, arrowprops={"arrowstyle": style, **look})


def frame(axes, left, low, right, high):
    """Draw a frame around what belongs together, behind all the rest."""
    look = {"facecolor": "#f7f7f7", "edgecolor": "#777777", "linewidth": 1.2}
    shape = "round,pad=0,rounding_size=0.15"
    size = right - left, high - low
    axes.add_patch(FancyBboxPatch((left, low), *size, shape, zorder=0, **look))


def save(drawings):
    """Save {name: axes} as PNG files of 1000 x 600 pixels and 256 colours."""
    FOLDER.mkdir(exist_ok=True)
    for name, axes in drawings.items():
        pixels = BytesIO()
        axes.figure.savefig(pixels, dpi=100, facecolor="white")
        image = Image.open(pixels).convert("RGB").quantize(256)
        image.save(FOLDER / name, optimize=True)  # a third as large
        print(f"Drawing saved to {FOLDER / name}")
