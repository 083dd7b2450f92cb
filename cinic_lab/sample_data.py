"""Draws a small stand-in for CINIC-10, in its folders and format.

    python sample_data.py [--to FOLDER] [--scale 0.1]

It goes to data/sample in the repository. The same images are drawn every time.
"""

import numpy as np

from common.drawing import COLOURS, SHAPES, draw_data_set, draw_shape
from common.prepare import prepare
from dataset import CLASSES, NAME, RAW, SIZE, SPLITS


def draw_images(folder, scale):
    """Draw a shape, of a colour, for each of CINIC-10's classes.

    At scale 1 there are 1,000 images to train, 200 to validate, and 200 to test on.
    """
    kinds = list(zip(CLASSES, SHAPES.values(), COLOURS.values(), strict=True))
    for split, images in {"train": 1000, "valid": 200, "test": 200}.items():
        for label, (name, radii, colour) in enumerate(kinds):
            target = folder / RAW / split / name
            target.mkdir(parents=True)
            for i in range(max(1, round(images * scale / 10))):
                rng = np.random.default_rng([len(split), ord(split[0]), label, i])
                image = draw_shape(rng, radii, colour)
                image.save(target / f"{split}-{i}.png")
    prepare(folder / RAW, folder, SPLITS, CLASSES, SIZE)


def main():
    draw_data_set(__doc__, NAME, draw_images)


if __name__ == "__main__":
    main()
