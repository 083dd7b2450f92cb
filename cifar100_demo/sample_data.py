"""Makes synthetic images, with the shapes and labels of CIFAR-100.

    python sample_data.py [--to FOLDER] [--scale 0.1]

They go to data/sample in the repository and are the same every time.
"""

import math

import numpy as np
import torch
from PIL import Image, ImageDraw
from tqdm import tqdm

from common.errors import run
from common.prepare import save_split
from common.synthetic import background, make_synthetic_data
from dataset import NAME, SPLITS

# A shape is a polygon: the radius of each corner, in order around the centre.
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


def draw_shape(rng, radii, colour):
    """Return a 32 x 32 RGB image: a shape of random size, position and angle."""
    image = background(rng, 64, 64).convert("L").convert("RGB")
    angles = np.linspace(0, 2 * math.pi, len(radii), endpoint=False)
    angles, radii = angles + rng.uniform(0, 2 * math.pi), np.array(radii)
    corners = np.stack([np.cos(angles), np.sin(angles)], 1) * radii[:, None]
    corners = corners * rng.uniform(14, 22) + rng.uniform(26, 38, 2)
    ImageDraw.Draw(image).polygon([tuple(corner) for corner in corners], colour)
    return image.resize((32, 32), Image.BILINEAR)


def make_images(folder, scale):
    """Save 5,000 training and 1,000 test images, times scale, of 100 classes.

    The classes are ten shapes in ten colours.
    """
    classes = [(shape, colour) for shape in SHAPES for colour in COLOURS]
    for seed, split, count in [(5, "train", 5000), (4, "test", 1000)]:
        rng, count = np.random.default_rng(seed), round(count * scale)
        labels = rng.permutation(np.arange(count) % 100)
        images = []
        for label in tqdm(labels, split, leave=False, disable=None):
            shape, colour = classes[label]
            image = draw_shape(rng, SHAPES[shape], COLOURS[colour])
            images.append(np.asarray(image).transpose(2, 0, 1))
        images = torch.from_numpy(np.stack(images))
        save_split(folder, split, images, torch.from_numpy(labels))


def main():
    make_synthetic_data(__doc__, NAME, SPLITS, make_images)


if __name__ == "__main__":
    run(main)
