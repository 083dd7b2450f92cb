"""Makes synthetic digits, with the shapes and labels of MNIST.

    python sample_data.py [--to FOLDER] [--scale 0.1]

They go to data/sample in the repository. The digits are the same every time.
"""

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from tqdm import tqdm

from common.errors import run
from common.prepare import save_split
from common.synthetic import make_synthetic_data
from dataset import NAME, SPLITS


def draw_digit(rng, digit):
    """Return an image (28, 28) of a digit with random size, position and tilt."""
    image = Image.new("L", (56, 56))
    font = ImageFont.load_default(rng.uniform(30, 46))
    ImageDraw.Draw(image).text((28, 28), str(digit), 255, font, "mm")
    turn, shift = rng.uniform(-15, 15), tuple(rng.uniform(-6, 6, 2))
    image = image.rotate(turn, Image.BILINEAR, translate=shift)
    return np.asarray(image.resize((28, 28), Image.BILINEAR))


def make_digits(folder, scale):
    """Save 6,000 training and 1,000 test digits, times scale."""
    for seed, split, count in [(5, "train", 6000), (4, "test", 1000)]:
        rng = np.random.default_rng(seed)
        labels = rng.integers(0, 10, round(count * scale), dtype=np.uint8)
        digits = tqdm(labels, split, leave=False, disable=None)
        images = np.stack([draw_digit(rng, digit) for digit in digits])
        images = torch.from_numpy(images).unsqueeze(1)
        save_split(folder, split, images, torch.from_numpy(labels).long())


def main():
    make_synthetic_data(__doc__, NAME, SPLITS, make_digits)


if __name__ == "__main__":
    run(main)
