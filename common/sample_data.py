"""Draws small stand-ins for the data sets, in their folders and file formats.

    python -m common.sample_data [NAME ...] [--to FOLDER] [--scale 0.1]

The same images are drawn every time. DATADIR=data/sample makes the scripts use them.
"""

import math
import pickle
import shutil
import struct
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from common.cli import OptionParser, UserError
from common.data import CINIC_CLASSES, SAMPLES


def background(rng, width, height):
    """Return an RGB image of random tiles or clouds, width x height pixels."""
    tiles = rng.integers(0, 255, (*rng.integers(2, 16, 2), 3), dtype=np.uint8)
    smooth = Image.BICUBIC if rng.random() < 0.7 else Image.NEAREST
    return Image.fromarray(tiles).resize((width, height), smooth)


def ellipse(x, y, width, height):
    """Return 32 points (x, y) of an ellipse around x, y with these radii."""
    angles = np.linspace(0, 2 * math.pi, 32)
    return np.stack([x + width * np.cos(angles), y + height * np.sin(angles)], 1)


def draw_animal(rng, kind):
    """Return an RGB image, 150 to 250 pixels a side, of one of "cats" or "dogs".

    Cats have pointed ears, whiskers and slit pupils; dogs have hanging ears and a
    muzzle. Size, place, tilt, colours and background tell nothing.
    """
    width, height = rng.integers(150, 250, 2)
    image = background(rng, width, height)
    draw = ImageDraw.Draw(image)
    turn, radius = rng.normal(0, 0.2), rng.uniform(0.22, 0.34) * min(width, height)
    centre = rng.uniform(0.38, 0.62, 2) * [width, height]
    cos, sin = radius * math.cos(turn), radius * math.sin(turn)

    def paint(points, colour, line=0):
        points = [
            tuple(p) for p in np.array(points) @ [[cos, sin], [-sin, cos]] + centre
        ]
        colour = tuple(int(c) for c in np.clip(colour, 0, 255))
        draw.line(points, colour, line) if line else draw.polygon(points, colour)

    fur = rng.uniform(60, 235) * rng.uniform([1, 0.7, 0.4], 1)
    dark, light = fur * rng.uniform(0.5, 0.8), fur * 0.6 + 100
    wide, black, pink = rng.uniform(0.9, 1.1), (25, 20, 20), (225, 140, 150)
    paint(ellipse(rng.normal(0, 0.3), 1.6, 1, 1), fur * 0.9)
    if kind == "cats":
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
        pupil = 0.05 if kind == "cats" else 0.11
        paint(ellipse(side * 0.38, -0.18, pupil, 0.13), black)
    return image


def dogs_vs_cats(folder, scale):
    """Draw cats and dogs: at scale 1, 640 to train, 200 to validate, 400 to test."""
    for split, images in {"train": 640, "validation": 200, "test": 400}.items():
        for label, kind in enumerate(["cats", "dogs"]):
            target = folder / "train-2000" / split / kind
            target.mkdir(parents=True)
            for i in range(max(1, round(images * scale / 2))):
                rng = np.random.default_rng([len(split), label, i])
                file = target / f"{kind[:-1]}.{i}.jpg"
                draw_animal(rng, kind).save(file, quality=90)


def draw_digit(rng, digit):
    """Return an image (28, 28) of a digit: its size, place and tilt are random."""
    image = Image.new("L", (56, 56))
    font = ImageFont.load_default(rng.uniform(30, 46))
    ImageDraw.Draw(image).text((28, 28), str(digit), 255, font, "mm")
    turn, shift = rng.uniform(-15, 15), tuple(rng.uniform(-6, 6, 2))
    image = image.rotate(turn, Image.BILINEAR, translate=shift)
    return np.asarray(image.resize((28, 28), Image.BILINEAR))


def mnist(folder, scale):
    """Draw digits in MNIST's files: at scale 1, 6,000 to train and 1,000 to test."""
    (folder / "raw").mkdir(parents=True)
    for name, count in {
        "train": round(6000 * scale),
        "t10k": round(1000 * scale),
    }.items():
        rng = np.random.default_rng(len(name))
        labels = rng.integers(0, 10, count, dtype=np.uint8)
        images = np.stack([draw_digit(rng, digit) for digit in labels])
        for kind, array in {"images": images, "labels": labels}.items():
            # IDX: two zeros, 8 for uint8, the number of dimensions; sizes; the data
            # (http://yann.lecun.com/exdb/mnist).
            header = struct.pack(
                f">4B{array.ndim}I", 0, 0, 8, array.ndim, *array.shape
            )
            file = folder / "raw" / f"{name}-{kind}-idx{array.ndim}-ubyte"
            file.write_bytes(header + array.tobytes())


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


def draw_shape(rng, radii, colour):
    """Return an RGB image, 32 x 32, of a shape of random size, place and tilt."""
    image = background(rng, 64, 64).convert("L").convert("RGB")
    angles = np.linspace(0, 2 * math.pi, len(radii), endpoint=False)
    angles, radii = angles + rng.uniform(0, 2 * math.pi), np.array(radii)
    corners = np.stack([np.cos(angles), np.sin(angles)], 1) * radii[:, None]
    corners = corners * rng.uniform(14, 22) + rng.uniform(26, 38, 2)
    ImageDraw.Draw(image).polygon([tuple(corner) for corner in corners], colour)
    return image.resize((32, 32), Image.BILINEAR)


def cifar100(folder, scale):
    """Draw 100 classes, shapes in colours, in CIFAR-100's files.

    At scale 1 there are 5,000 images to train and 1,000 to validate on.
    """
    kinds = [(shape, colour) for shape in SHAPES for colour in COLOURS]
    folder.mkdir(parents=True)
    for name, count in {"train": 5000, "test": 1000}.items():
        rng, count = np.random.default_rng(len(name)), round(count * scale)
        labels = rng.permutation(np.arange(count) % 100).tolist()
        images = []
        for label in labels:
            shape, colour = kinds[label]
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
        "fine_label_names": [f"{colour}_{shape}" for shape, colour in kinds],
        "coarse_label_names": list(SHAPES),
    }
    (folder / "meta").write_bytes(pickle.dumps(meta, protocol=2))


def cinic(folder, scale):
    """Draw a shape, of a colour, for each of CINIC-10's classes.

    At scale 1 there are 1,000 images to train, 200 to validate, and 200 to test on.
    """
    kinds = list(zip(CINIC_CLASSES, SHAPES.values(), COLOURS.values(), strict=True))
    for split, images in {"train": 1000, "valid": 200, "test": 200}.items():
        for label, (name, radii, colour) in enumerate(kinds):
            target = folder / split / name
            target.mkdir(parents=True)
            for i in range(max(1, round(images * scale / 10))):
                rng = np.random.default_rng([len(split), ord(split[0]), label, i])
                image = draw_shape(rng, radii, colour)
                image.save(target / f"{split}-{i}.png")


DATASETS = {
    "dogs-vs-cats": dogs_vs_cats,
    "MNIST": mnist,
    "cifar-100-python": cifar100,
    "CINIC": cinic,
}


def main():
    parser = OptionParser(__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(DATASETS))
    parser.add_argument("--to", type=Path, default=SAMPLES)
    parser.add_argument("--scale", type=float, default=1, help="how many, of all")
    args = parser.parse_args()
    if unknown := set(args.names) - set(DATASETS):
        raise UserError(
            f"no {', '.join(unknown)}: type one of {', '.join(DATASETS)}"
        )
    for name in args.names or DATASETS:
        target, drawing = args.to / name, args.to / f"{name}.drawing"
        if target.exists():
            print(f"{target} is there already")
            continue
        shutil.rmtree(drawing, ignore_errors=True)
        DATASETS[name](drawing, args.scale)
        drawing.rename(target)
        print(f"Drew {target}")


if __name__ == "__main__":
    main()
