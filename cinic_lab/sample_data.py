"""Makes synthetic images, in CINIC-10's folders and format.

    python sample_data.py [--to FOLDER] [--scale 0.1]

They go to data/sample in the repository and are the same every time.
"""

import colorsys

import numpy as np
from PIL import ImageOps
from tqdm import tqdm

from common.errors import run
from common.prepare import prepare
from common.synthetic import background, make_synthetic_data
from dataset import CLASSES, NAME, RAW, SIZE, SPLITS


def make_image(rng, label):
    """Return a 32 x 32 RGB image of tiles or clouds in the colour of its class."""
    colour = [round(255 * c) for c in colorsys.hsv_to_rgb(label / 10, 1, 0.8)]
    grey = background(rng, 32, 32).convert("L")
    return ImageOps.colorize(grey, "black", "white", colour)


def make_images(folder, scale):
    """Make 1,000 training, 200 validation and 200 test images, times scale."""
    for split, images in {"train": 1000, "valid": 200, "test": 200}.items():
        classes = tqdm(CLASSES, split, leave=False, disable=None)
        for label, name in enumerate(classes):
            target = folder / RAW / split / name
            target.mkdir(parents=True, exist_ok=True)
            for i in range(max(1, round(images * scale / 10))):
                rng = np.random.default_rng([len(split), ord(split[0]), label, i])
                make_image(rng, label).save(target / f"{split}-{i}.png")
    prepare(folder / RAW, folder, SPLITS, SIZE)


def main():
    make_synthetic_data(__doc__, NAME, SPLITS, make_images)


if __name__ == "__main__":
    run(main)
