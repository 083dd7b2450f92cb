"""Makes synthetic data in place of CINIC-10, in its folders and format.

    python sample_data.py [--to FOLDER] [--scale 0.1]

It goes to data/sample in the repository. The images are the same every time.
"""

import colorsys

import numpy as np
from PIL import ImageOps

from common.data import prepared_file
from common.prepare import find_image_root, prepare, progress_bar
from common.synthetic import background, make_synthetic_data
from dataset import CLASSES, NAME, RAW, SIZE, SPLITS


def draw_image(rng, label):
    """Return an RGB image, 32 x 32, of tiles or clouds in the colour of a class."""
    colour = [round(255 * c) for c in colorsys.hsv_to_rgb(label / 10, 1, 0.8)]
    grey = background(rng, 32, 32).convert("L")
    return ImageOps.colorize(grey, "black", "white", colour)


def draw_images(folder, scale):
    """At scale 1 draw 1,000 images to train, 200 to validate, and 200 to test on."""
    for split, images in {"train": 1000, "valid": 200, "test": 200}.items():
        for label, name in enumerate(CLASSES):
            target = folder / RAW / split / name
            target.mkdir(parents=True)
            count = max(1, round(images * scale / 10))
            for i in progress_bar(range(count), f"{split} {name}"):
                rng = np.random.default_rng([len(split), ord(split[0]), label, i])
                draw_image(rng, label).save(target / f"{split}-{i}.png")


def prepare_images(folder):
    if not prepared_file(folder, SPLITS[-1], SIZE).exists():
        source = find_image_root(folder, SPLITS[0], CLASSES[0])
        prepare(source, folder, SPLITS, CLASSES, SIZE)


def main():
    make_synthetic_data(__doc__, NAME, draw_images, prepare_images)


if __name__ == "__main__":
    main()
