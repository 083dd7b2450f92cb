"""What the sample_data.py of the exercises share: they draw small stand-ins."""

import math
import shutil
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

from common.cli import OptionParser
from common.data import SAMPLES

# Shapes by the radii of their corners, from corner to corner around the centre.
SHAPES = {
    "circle": [1.0] * 24,
    "triangle": [1.2] * 3,
    "square": [1.1] * 4,
    "pentagon": [1.0] * 5,
    "star": [1.2, 0.5] * 5,
    "cross": [1.2, 0.4, 1.2, 0.4] * 2,
    "sun": [1.1, 0.8] * 12,
    "pebble": [1.3, 0.8, 0.7, 0.7, 0.7, 0.8],
    "dart": [1.3, 0.7, 0.2, 0.7],
    "needle": [1.3, 0.25] * 2,
}
COLOURS = {
    "red": (220, 30, 30),
    "orange": (240, 140, 20),
    "yellow": (240, 230, 40),
    "green": (30, 150, 40),
    "cyan": (40, 220, 220),
    "blue": (40, 60, 220),
    "purple": (130, 40, 170),
    "pink": (245, 150, 200),
    "black": (15, 15, 15),
    "white": (250, 250, 250),
}


def background(rng, width, height):
    """Return an RGB image of random tiles or clouds, width x height pixels."""
    tiles = rng.integers(0, 255, (*rng.integers(2, 16, 2), 3), dtype=np.uint8)
    smooth = Image.BICUBIC if rng.random() < 0.7 else Image.NEAREST
    return Image.fromarray(tiles).resize((width, height), smooth)


def draw_shape(rng, radii, colour):
    """Return an RGB image, 32 x 32, of a shape of random size, place and tilt."""
    image = background(rng, 64, 64).convert("L").convert("RGB")
    angles = np.linspace(0, 2 * math.pi, len(radii), endpoint=False)
    angles, radii = angles + rng.uniform(0, 2 * math.pi), np.array(radii)
    corners = np.stack([np.cos(angles), np.sin(angles)], 1) * radii[:, None]
    corners = corners * rng.uniform(14, 22) + rng.uniform(26, 38, 2)
    ImageDraw.Draw(image).polygon([tuple(corner) for corner in corners], colour)
    return image.resize((32, 32), Image.BILINEAR)


def draw_data_set(doc, name, draw):
    """The command sample_data.py: draw a data set, ready for the scripts.

    draw(folder, scale) makes its files; scale is how many, of all. They are the same
    every time.
    """
    parser = OptionParser(doc)
    parser.add_argument("--to", type=Path, default=SAMPLES, metavar="FOLDER")
    parser.add_argument("--scale", type=float, default=1, help="how many, of all")
    args = parser.parse_args()
    target, drawing = args.to / name, args.to / f"{name}.drawing"
    if not target.exists():
        shutil.rmtree(drawing, ignore_errors=True)
        draw(drawing, args.scale)
        drawing.rename(target)
    print(f"{target} is ready: type `export DATADIR={args.to.resolve()}`")
