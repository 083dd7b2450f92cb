"""What the figures of this folder share: cells with a text, and PNG files."""

import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.append(str(REPOSITORY / "tools"))  # palette.py

WIDTH = 8.3  # inches of 100 pixels: a README on GitHub


def draw_cells(axes, left, y, texts, colour, width=1.0):
    """Draw a row of cells, each with a text; colour: of all, or a list of theirs."""
    colours = [colour] * len(texts) if isinstance(colour, str) else colour
    for n, (text, fill) in enumerate(zip(texts, colours, strict=True)):
        x = left + n * width
        axes.barh(y, width, 0.8, x, color=fill, ec="white", lw=2)
        red, green, blue = (int(fill[i : i + 2], 16) for i in (1, 3, 5))
        ink = "white" if 0.3 * red + 0.59 * green + 0.11 * blue < 140 else "black"
        place = {"ha": "center", "va": "center", "color": ink, "size": 12}
        axes.text(x + width / 2, y, text, **place)


def hide_frame(axes):
    """Leave only what is drawn, without the lines and numbers of the axes."""
    axes.spines[:].set_visible(False)
    axes.set(xticks=[], yticks=[])


def save(figure, file):
    """Save a figure as a PNG; file: path in the repository."""
    figure.savefig(REPOSITORY / file, dpi=100, facecolor="white")
    print(f"Saved {file}")
