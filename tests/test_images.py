"""Every kind of image file becomes the same RGB bytes, or one line says why not."""

import io
import os
import shutil
import struct
import time
import warnings
import zlib

import numpy as np
import pytest
import torch
from conftest import as_nobody, call, load, mistake
from PIL import Image

from common import prepare
from common.cli import UserError

CLASSES = ("a", "b")
COLOUR = (200, 100, 50)
ORIENTATION = 0x0112  # the tag of EXIF that says how the camera was held


@pytest.fixture
def photos(tmp_path):
    """A folder of one split with two classes, of two photos each."""
    for name in CLASSES:
        (tmp_path / "images/train" / name).mkdir(parents=True)
        for i in range(2):
            image = Image.new("RGB", (8, 8), (100 * i, 0, 0))
            image.save(tmp_path / f"images/train/{name}/{i}.png")
    return tmp_path / "images"


@pytest.fixture
def target(tmp_path):
    (tmp_path / "set").mkdir()
    return tmp_path / "set"


def do(photos, target, **options):
    prepare.prepare(photos, target, ("train",), CLASSES, 8, **options)
    return torch.load(target / "train-8.pt")


def png(width, height, depth, colours, rows):
    """Return a PNG of these rows: Pillow writes none with 16 bits a colour."""

    def chunk(kind, body):
        whole = kind + body
        check = struct.pack(">I", zlib.crc32(whole))
        return struct.pack(">I", len(body)) + whole + check

    header = struct.pack(">IIBBBBB", width, height, depth, colours, 0, 0, 0)
    body = zlib.compress(b"".join(b"\0" + row for row in rows))
    parts = chunk(b"IHDR", header), chunk(b"IDAT", body), chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def read(image, size=8, kind="PNG", **options):
    """Return what read_photo() makes of an image, or of a file's bytes."""
    if isinstance(image, Image.Image):
        file = io.BytesIO()
        image.save(file, kind, **options)
        image = file.getvalue()
    return prepare.read_photo(io.BytesIO(image), size)


def is_all(pixels, colour, by=3):
    return (pixels - torch.tensor(colour).view(3, 1, 1)).abs().max() <= by


KINDS = {
    "RGB": (COLOUR, ()),
    "RGBA": (COLOUR, ()),
    "CMYK": (COLOUR, ("JPEG",)),
    "P": (COLOUR, ("PNG", "GIF")),
    "L": ((124, 124, 124), ()),
    "LA": ((124, 124, 124), ()),
    "1": ((255, 255, 255), ()),
}


@pytest.mark.parametrize("size", [(1, 1), (1, 300), (8, 8), (301, 203)])
@pytest.mark.parametrize("mode", KINDS)
def test_every_mode_and_size(mode, size):
    colour, kinds = KINDS[mode]
    image = Image.new("RGB", size, COLOUR if mode != "1" else (255,) * 3)
    image = image.convert("L").convert("LA") if mode == "LA" else image.convert(mode)
    for kind in kinds or ("PNG",):
        pixels = read(image, kind=kind)
        assert pixels.shape == (3, 8, 8) and pixels.dtype == torch.uint8
        if mode == "P":  # a small palette has no such colour, and mixes others
            pixels = pixels.float().mean((1, 2), keepdim=True)
        assert is_all(pixels, colour, 26 if mode == "P" else 3)


@pytest.mark.parametrize("grey", [0, 255, 256, 30000, 65535])
def test_16_bits_of_grey_are_not_white(grey):
    image = Image.fromarray(np.full((20, 30), grey, dtype=np.uint16))
    assert is_all(read(image), (grey >> 8,) * 3, 1)
    assert is_all(read(image, kind="TIFF"), (grey >> 8,) * 3, 1)


def test_16_bits_of_each_colour():
    row = struct.pack(">3H", *(257 * c for c in COLOUR)) * 9
    assert is_all(read(png(9, 9, 16, 2, [row] * 9)), COLOUR, 1)


def test_of_a_film_the_first_image_counts():
    first, second = (Image.new("RGB", (9, 9), c) for c in (COLOUR, (0, 0, 0)))
    for kind in ("PNG", "GIF"):
        pixels = read(first, kind=kind, save_all=True, append_images=[second])
        assert is_all(pixels, COLOUR)


def quarters():
    """Return an image of four quarters: white, grey; black, black."""
    image = Image.new("RGB", (64, 64))
    image.paste((255, 255, 255), (0, 0, 32, 32))
    image.paste((128, 128, 128), (32, 0, 64, 32))
    return image


# What makes the photo of the rows and columns in the file, by EXIF's orientation.
TURNS = {
    1: lambda rows: rows,
    2: lambda rows: rows.flip(1),
    3: lambda rows: rows.flip(0, 1),
    4: lambda rows: rows.flip(0),
    5: lambda rows: rows.T,
    6: lambda rows: rows.T.flip(1),
    7: lambda rows: rows.T.flip(0, 1),
    8: lambda rows: rows.T.flip(0),
}


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
@pytest.mark.parametrize("orientation", [*TURNS, 0, 9])
def test_a_camera_that_was_held_sideways(orientation, kind):
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    pixels = read(quarters(), kind=kind, exif=exif).float()
    rows = torch.tensor([[255.0, 128.0], [0.0, 0.0]])
    expected = TURNS.get(orientation, TURNS[1])(rows)
    assert (pixels[0, 1::5, 1::5] - expected).abs().max() < 10


@pytest.mark.parametrize(
    "exif", [b"Exif\0\0", b"Exif\0\0MM\0*\0\0", b"Exif\0\0" * 9]
)
def test_odd_exif_data_make_no_photo_unreadable(exif):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pixels = read(quarters(), kind="JPEG", exif=exif)
    assert pixels[0, 0, 0] > 127 and pixels[0, -1, -1] < 127


def test_a_photo_that_is_wide_and_lies():
    """It is turned before it is made square, and is decoded small as ever."""
    exif, image = Image.Exif(), Image.new("RGB", (1200, 600))
    image.paste((255, 255, 255), (0, 0, 1200, 150))  # a quarter, at the top
    exif[ORIENTATION] = 6  # that lies at the right in the photo
    pixels = read(image, kind="JPEG", exif=exif)
    assert (pixels[:, :, 6:] > 200).all() and (pixels[:, :, :6] < 55).all()


def test_20_000_pixels(photos, target):
    huge = photos / "train/b/huge.png"
    row = bytes(20_000 // 8)
    huge.write_bytes(png(20_000, 20_000, 1, 0, (row for _ in range(20_000))))
    with mistake(r"1 of 5 images .*too large.*huge\.png.*--skip-bad"):
        do(photos, target)
    assert len(do(photos, target, skip_bad=True)["labels"]) == 4
    huge.write_bytes(png(20_000, 200, 1, 0, (row for _ in range(200))))
    (target / "train-8.pt").unlink()
    assert len(do(photos, target)["labels"]) == 5  # large, and right


def test_what_is_left_out_is_counted(photos, target, capsys):
    Image.new("RGB", (8, 8)).save(photos / "train/a/LOUD.JPG", "JPEG")
    do(photos, target)
    assert "left out" not in capsys.readouterr().out
    for name in ("a/x.webp", "a/y.webp", "b/notes.txt"):
        (photos / "train" / name).write_bytes(b"")
    (photos / "train/b/more").mkdir()
    (target / "train-8.pt").unlink()
    assert len(do(photos, target)["labels"]) == 5
    said = capsys.readouterr().out
    assert "4 files left out (.txt, .webp, more): not .jpg, .jpeg, .png" in said


def test_a_photo_that_was_replaced_is_taken(photos, target):
    assert do(photos, target)["images"][3, 0, 0, 0] == 100
    prepared = target / "train-8.pt"
    before = prepared.stat().st_mtime_ns
    do(photos, target)
    assert prepared.stat().st_mtime_ns == before
    time.sleep(0.1)  # the system's clock for files ticks slowly
    Image.new("RGB", (8, 8), (7, 0, 0)).save(photos / "train/b/1.png")
    assert do(photos, target)["images"][3, 0, 0, 0] == 7
    time.sleep(0.1)
    (photos / "train/a/0.png").unlink()
    assert len(do(photos, target)["labels"]) == 3


nobody = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another")


@nobody
@pytest.mark.parametrize("what", ["train/a/0.png", "train/a", "train", ""])
@pytest.mark.parametrize("exercise", ["exercise8", "cinic_lab"])
def test_what_may_not_be_read_is_no_damage(exercise, what, sample, public):
    """A photo, or a folder: nobody is told to delete or to replace it."""
    module, dataset = load(exercise, "download_data"), load(exercise, "dataset")
    source = shutil.copytree(sample / dataset.NAME / dataset.RAW, public / "photos")
    closed = source / what.replace("/a", f"/{dataset.CLASSES[0]}")
    if what.endswith("png"):
        closed = sorted(closed.parent.iterdir())[0]
    for mode in (0o000, 0o444) if closed.is_dir() else (0o000,):
        closed.chmod(mode)
        as_nobody(lambda: refused(module, source, public / "mine"))
    closed.chmod(0o755)


def refused(module, source, target):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DATADIR", str(target))
        for options in ((), ("--skip-bad",)):
            with pytest.raises(UserError) as error:
                call(module, "--from", source, *options)
            text = str(error.value)
            assert "Permission denied" in text and str(source) in text, text
            for word in ("delete", "damaged", "replace", "add them"):
                assert word not in text, text
    assert not list(target.glob("*/*"))
