"""Synthetic data: what the sample_data.py of all exercises share."""

import shutil
from pathlib import Path

import numpy as np
from PIL import Image

from common.cli import OptionParser, UserError
from common.data import SYNTHETIC_DIR
from common.prepare import disk_full_hint


def background(rng, width, height):
    """Return an RGB image of random tiles or clouds, width x height pixels."""
    tiles = rng.integers(0, 255, (*rng.integers(2, 16, 2), 3), dtype=np.uint8)
    smooth = Image.BICUBIC if rng.random() < 0.7 else Image.NEAREST
    return Image.fromarray(tiles).resize((width, height), smooth)


def make_synthetic_data(doc, name, make_files, prepare=lambda folder: None):
    """Run the command sample_data.py: make a synthetic data set, ready for training.

    make_files(folder, scale) writes its files, the same every time; scale is their
    number, relative to the default. prepare(folder) then prepares them.
    """
    parser = OptionParser(doc)
    add, text = parser.add_argument, "folder for the data"
    add("--to", type=Path, default=SYNTHETIC_DIR, metavar="FOLDER", help=text)
    text = "size of the data set, relative to the default"
    add("--scale", type=float, default=1, help=text)
    args = parser.parse_args()
    target, part = args.to / name, args.to / f"{name}.part"
    if not 0.01 <= args.scale <= 100:
        raise UserError(f"--scale {args.scale}: use a number from 0.01 to 100")
    try:
        if not target.exists():
            shutil.rmtree(part, ignore_errors=True)
            print(f"Making {target}", flush=True)
            make_files(part, args.scale)
            part.rename(target)
        prepare(target)
    except OSError as error:
        shutil.rmtree(part, ignore_errors=True)
        where = error.filename or target
        what = disk_full_hint(error, "use another --to")
        raise UserError(f"{where}: {error.strerror}; {what}") from None
    print(f"{target} is ready: run `export DATADIR={args.to.resolve()}`")
