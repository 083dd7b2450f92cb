"""Makes synthetic photos of cats and dogs, in the real data's folders and formats.

    python sample_data.py [--to FOLDER] [--scale 0.1]

They go to data/sample in the repository. The photos are the same every time.
"""

import math

import numpy as np
from PIL import ImageDraw
from tqdm import tqdm

from common.errors import run
from common.prepare import prepare
from common.synthetic import background, make_synthetic_data
from dataset import NAME, RAW, SIZE, SPLITS


def ellipse(x, y, width, height):
    """Return 32 points (x, y) of an ellipse; width and height are its radii."""
    angles = np.linspace(0, 2 * math.pi, 32)
    return np.stack([x + width * np.cos(angles), y + height * np.sin(angles)], 1)


def draw_animal(rng, animal):
    """Return an RGB image, 150 to 250 pixels a side; animal is "cats" or "dogs".

    Cats have pointed ears, whiskers and slit pupils; dogs have hanging ears and a
    muzzle. Size, position, tilt, colours and background do not depend on the animal.
    """
    width, height = rng.integers(150, 250, 2)
    image = background(rng, width, height)
    draw = ImageDraw.Draw(image)
    turn, radius = rng.normal(0, 0.2), rng.uniform(0.22, 0.34) * min(width, height)
    centre = rng.uniform(0.38, 0.62, 2) * [width, height]
    cos, sin = radius * math.cos(turn), radius * math.sin(turn)

    def paint(points, colour, line=0):
        points = np.array(points) @ [[cos, sin], [-sin, cos]] + centre
        points = [tuple(point) for point in points]
        colour = tuple(int(c) for c in np.clip(colour, 0, 255))
        draw.line(points, colour, line) if line else draw.polygon(points, colour)

    fur = rng.uniform(60, 235) * rng.uniform([1, 0.7, 0.4], 1)
    dark, light = fur * rng.uniform(0.5, 0.8), fur * 0.6 + 100
    wide, black, pink = rng.uniform(0.9, 1.1), (25, 20, 20), (225, 140, 150)
    paint(ellipse(rng.normal(0, 0.3), 1.6, 1, 1), fur * 0.9)
    if animal == "cats":
        for side in (-1, 1):
            ear = np.array([[0.95, -0.2], [0.85, -1.35], [0.2, -0.8]]) * [side, 1]
            paint(ear, fur)
            paint(ear * 0.6 + 0.4 * ear.mean(0), pink)
        paint(ellipse(0, 0, wide, 0.88), fur)
        paint([(-0.12, 0.22), (0.12, 0.22), (0, 0.38)], pink)
        for slope in (-0.12, 0.02, 0.16):
            for side in (-1, 1):
                paint([(side * 0.2, 0.4), (side * 1.2, 0.4 + slope * 2)], light, 2)
    else:
        paint(ellipse(0, 0, 0.85, wide), fur)
        for side in (-1, 1):
            paint(ellipse(side * 0.9, rng.uniform(0.1, 0.3), 0.3, 0.75), dark)
        if rng.random() < 0.5:
            paint(ellipse(0, 0.95, 0.16, 0.35), pink)
        paint(ellipse(0, 0.5, 0.48, 0.42), light)
        paint(ellipse(0, 0.28, 0.2, 0.14), black)
    for side in (-1, 1):
        paint(ellipse(side * 0.38, -0.18, 0.18, 0.15), (230, 230, 200))
        pupil = 0.05 if animal == "cats" else 0.11
        paint(ellipse(side * 0.38, -0.18, pupil, 0.13), black)
    return image


def make_photos(folder, scale):
    """Draw 400 training, 200 validation and 1,200 test photos, times scale."""
    for split, images in {"train": 400, "validation": 200, "test": 1200}.items():
        for label, animal in enumerate(("cats", "dogs")):
            target = folder / RAW / split / animal
            target.mkdir(parents=True, exist_ok=True)
            count = max(1, round(images * scale / 2))
            for i in tqdm(
                range(count), f"{split} {animal}", leave=False, disable=None
            ):
                rng = np.random.default_rng([len(split), label, i])
                file = target / f"{animal[:-1]}.{i}.jpg"
                draw_animal(rng, animal).save(file, quality=90)
    prepare(folder / RAW, folder, SPLITS, SIZE)


def main():
    make_synthetic_data(__doc__, NAME, SPLITS, make_photos)


if __name__ == "__main__":
    run(main)
