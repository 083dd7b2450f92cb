"""Makes synthetic digits, in MNIST's file format.

    python sample_data.py [--to FOLDER] [--scale 0.1]

They go to data/sample in the repository. The digits are the same every time.
"""

import struct

import common.cli  # noqa: F401, first: it reports missing packages in one line

# isort: split
import numpy as np
from PIL import Image, ImageDraw, ImageFont

from common.prepare import progress_bar
from common.synthetic import make_synthetic_data


def draw_digit(rng, digit):
    """Return an image (28, 28) of a digit with random size, position and tilt."""
    image = Image.new("L", (56, 56))
    font = ImageFont.load_default(rng.uniform(30, 46))
    ImageDraw.Draw(image).text((28, 28), str(digit), 255, font, "mm")
    turn, shift = rng.uniform(-15, 15), tuple(rng.uniform(-6, 6, 2))
    image = image.rotate(turn, Image.BILINEAR, translate=shift)
    return np.asarray(image.resize((28, 28), Image.BILINEAR))


def draw_files(folder, scale):
    """Write 6,000 training and 1,000 test digits, times scale, in MNIST's files."""
    (folder / "raw").mkdir(parents=True)
    for name, count in {
        "train": round(6000 * scale),
        "t10k": round(1000 * scale),
    }.items():
        rng = np.random.default_rng(len(name))
        labels = rng.integers(0, 10, count, dtype=np.uint8)
        images = np.stack(
            [draw_digit(rng, digit) for digit in progress_bar(labels, name)]
        )
        for kind, array in {"images": images, "labels": labels}.items():
            # IDX: two zeros, 8 for uint8, number of dimensions, sizes, then the data
            # (http://yann.lecun.com/exdb/mnist).
            header = struct.pack(
                f">4B{array.ndim}I", 0, 0, 8, array.ndim, *array.shape
            )
            file = folder / "raw" / f"{name}-{kind}-idx{array.ndim}-ubyte"
            file.write_bytes(header + array.tobytes())


def main():
    make_synthetic_data(__doc__, "MNIST", draw_files)


if __name__ == "__main__":
    main()
