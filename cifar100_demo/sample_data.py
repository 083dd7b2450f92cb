"""Synthetic images in the file format of CIFAR-100: coloured shapes.

    python sample_data.py [--to FOLDER] [--scale 0.1]

They go to data/sample in the repository and are the same every time.
"""

import math
import pickle

import common.cli  # noqa: F401, first: it reports missing packages in one line

# isort: split
import numpy as np
from PIL import Image, ImageDraw

from common.prepare import progress_bar
from common.synthetic import background, make_synthetic_data

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


def make_files(folder, scale):
    """Write the files of CIFAR-100 with 100 classes: ten shapes in ten colours.

    At scale 1 there are 5,000 training and 1,000 validation images.
    """
    classes = [(shape, colour) for shape in SHAPES for colour in COLOURS]
    folder.mkdir(parents=True)
    for name, count in {"train": 5000, "test": 1000}.items():
        rng, count = np.random.default_rng(len(name)), round(count * scale)
        labels = rng.permutation(np.arange(count) % 100).tolist()
        images = []
        for label in progress_bar(labels, name):
            shape, colour = classes[label]
            image = draw_shape(rng, SHAPES[shape], COLOURS[colour])
            images.append(np.asarray(image).transpose(2, 0, 1).ravel())
        split = {
            "data": np.array(images),
            "fine_labels": labels,
            "coarse_labels": [label // 10 for label in labels],
            "filenames": [f"{name}_{i}.png" for i in range(count)],
        }
        (folder / name).write_bytes(pickle.dumps(split, protocol=2))
    meta = {
        "fine_label_names": [f"{colour}_{shape}" for shape, colour in classes],
        "coarse_label_names": list(SHAPES),
    }
    (folder / "meta").write_bytes(pickle.dumps(meta, protocol=2))


def main():
    make_synthetic_data(__doc__, "cifar-100-python", make_files)


if __name__ == "__main__":
    main()
