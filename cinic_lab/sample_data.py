"""Synthetic data in place of CINIC-10, in its folders and format.

    python sample_data.py [--to FOLDER] [--scale 0.1]

It goes to data/sample in the repository and is the same every time.
"""

import colorsys

import numpy as np
from PIL import ImageOps

from common.data import prepared_file
from common.errors import run
from common.prepare import find_image_root, prepare, progress_bar
from common.synthetic import background, make_synthetic_data
from dataset import CLASSES, NAME, RAW, SIZE, SPLITS


def make_image(rng, label):
    """Return a 32 x 32 RGB image of tiles or clouds in the colour of its class."""
    colour = [round(255 * c) for c in colorsys.hsv_to_rgb(label / 10, 1, 0.8)]
    grey = background(rng, 32, 32).convert("L")
    return ImageOps.colorize(grey, "black", "white", colour)


def make_images(folder, scale):
    """Write scale times 1,000 training, 200 validation and 200 test images."""
    for split, images in {"train": 1000, "valid": 200, "test": 200}.items():
        for label, name in enumerate(CLASSES):
            target = folder / RAW / split / name
            target.mkdir(parents=True)
            count = max(1, round(images * scale / 10))
            for i in progress_bar(range(count), f"{split} {name}"):
                rng = np.random.default_rng([len(split), ord(split[0]), label, i])
                make_image(rng, label).save(target / f"{split}-{i}.png")


def prepare_images(folder):
    if not prepared_file(folder, SPLITS[-1], SIZE).exists():
        source = find_image_root(folder, SPLITS[0], CLASSES[0])
        prepare(source, folder, SPLITS, CLASSES, SIZE)


def main():
    make_synthetic_data(__doc__, NAME, make_images, prepare_images)


if __name__ == "__main__":
    run(main)
