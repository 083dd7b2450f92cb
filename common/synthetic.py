"""Functions that the sample_data.py of several lessons share."""

import argparse
import shlex
from pathlib import Path

import numpy as np
from PIL import Image

from common.data import REPOSITORY

SYNTHETIC_DIR = REPOSITORY / "data" / "sample"


def background(rng, width, height):
    """Return an RGB image of random tiles or clouds, width x height pixels."""
    tiles = rng.integers(0, 255, (*rng.integers(2, 16, 2), 3), dtype=np.uint8)
    smooth = Image.BICUBIC if rng.random() < 0.7 else Image.NEAREST
    return Image.fromarray(tiles).resize((width, height), smooth)


def make_synthetic_data(doc, name, splits, make):
    """Run the command sample_data.py: make a data set, unless it is there.

    make(folder, scale) saves all splits in folder, the same every time; scale
    multiplies the default number of images.
    """
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=doc, formatter_class=layout)
    parser.add_argument("--to", type=Path, default=SYNTHETIC_DIR, help="data folder")
    parser.add_argument("--scale", type=float, default=1, help="size factor")
    args = parser.parse_args()
    folder = args.to / name
    if not all((folder / f"{split}.pt").exists() for split in splits):
        print(f"Making {folder}", flush=True)
        folder.mkdir(parents=True, exist_ok=True)
        make(folder, args.scale)
    elif args.scale != 1:
        print(f"{folder} exists already: delete it for another --scale")
    datadir = shlex.quote(str(args.to.resolve()))
    print(f"{folder} is ready: run `export DATADIR={datadir}`")
