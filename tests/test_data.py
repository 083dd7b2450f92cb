"""Data: batches, data sets, prepared images, downloads, synthetic data."""

import codecs
import gzip
import hashlib
import io
import multiprocessing
import os
import pickle
import shutil
import signal
import struct
import subprocess
import tarfile
import threading
import zipfile
from collections import Counter
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import (
    WITH_DATA,
    as_nobody,
    call,
    load,
    raises_user_error,
    serving,
)
from PIL import Image
from torch.utils.data import Subset
from torchvision.datasets import MNIST
from torchvision.transforms.v2 import functional as F

from common import download, prepare
from common.data import load_prepared, make_loader, normalise
from common.metrics import batch_sums, to_metrics

CPU = torch.device("cpu")
SETS = {exercise: load(exercise, "dataset") for exercise in WITH_DATA}
DOWNLOADS = {exercise: load(exercise, "download_data") for exercise in WITH_DATA}
PHOTOS, CINIC = DOWNLOADS["exercise8"], DOWNLOADS["cinic_lab"]
WEIGHTS = load("exercise8", "download_weights")
NOWHERE = "http://localhost:1/never"
needs_root = pytest.mark.skipif(
    os.geteuid() != 0, reason="only root can become another user, or mount a disk"
)


@pytest.fixture
def datadir(tmp_path, monkeypatch):
    """Return an empty DATADIR."""
    monkeypatch.setenv("DATADIR", str(tmp_path / "data"))
    return tmp_path / "data"


@pytest.fixture
def photos(sample, monkeypatch):
    monkeypatch.setenv("DATADIR", str(sample))
    return SETS["exercise8"].dogs_vs_cats()


def names(folder):
    return sorted(path.name for path in folder.iterdir())


# Batches


def test_a_loader_yields_each_image_once(photos):
    train, validation, _ = photos
    loader = make_loader(train, 12, CPU, shuffle=True)
    first, second = ([images for images, _ in loader] for _ in range(2))
    assert [len(images) for images in first] == [12, 12, 12, 4]
    assert torch.cat(first).sum() == torch.cat(second).sum() == train.images.sum()
    assert not torch.equal(first[0], second[0])
    loader = make_loader(train, 12, CPU, drop_last=True)
    assert [len(images) for images, _ in loader] == [12, 12, 12]
    assert list(make_loader(Subset(validation, []), 10, CPU)) == []  # a rank's share


@pytest.mark.filterwarnings("ignore:.*pin_memory.*")
def test_workers_share_the_images(photos):
    cuda = torch.device("cuda")
    assert make_loader(photos[0], 10, cuda).num_workers == 0
    loader = make_loader(photos[0], 10, cuda, shuffle=True, workers=2)
    assert loader.num_workers == 2
    assert loader.persistent_workers and loader.pin_memory
    images, labels = (torch.cat(part) for part in zip(*loader, strict=True))
    assert labels.sum() == 20
    assert images.sum() == photos[0].images.sum()


def test_images_are_normalised_as_published_and_as_torchvision_does():
    from torchvision.models import VGG16_Weights

    imagenet = VGG16_Weights.IMAGENET1K_V1.transforms()
    for exercise, mean, std in (
        ("exercise8", imagenet.mean, imagenet.std),
        ("mnist_multigpu", [0.1307], [0.3081]),
        ("cifar100_demo", [0.5071, 0.4865, 0.4409], [0.2673, 0.2564, 0.2762]),
        ("cinic_lab", [0.4789, 0.4723, 0.4305], [0.2421, 0.2383, 0.2587]),
    ):
        dataset, shape = SETS[exercise], (4, len(mean), 15, 15)
        images = torch.randint(0, 256, shape, dtype=torch.uint8)
        expected = F.normalize(F.to_dtype(images, scale=True), mean, std)
        found = normalise(images, dataset.MEAN, dataset.STD)
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


def test_augmentation_is_random_for_each_image_and_within_bounds():
    torch.manual_seed(0)
    y, x = torch.meshgrid(*[torch.linspace(-1, 1, 101)] * 2, indexing="ij")
    images = torch.stack([x, y, torch.ones_like(x)]).repeat(200, 1, 1, 1)
    new = SETS["exercise8"].augment(images)
    assert new.shape == images.shape
    centre = slice(45, 56)
    across = (new[:, 0, 50, 55] - new[:, 0, 50, 45]) / 0.2  # mirror / scale
    down = (new[:, 1, 55, 50] - new[:, 1, 45, 50]) / 0.2  # 1 / scale
    shear = (new[:, 0, 55, 50] - new[:, 0, 45, 50]) / 0.2 / down
    torch.testing.assert_close(across.abs(), down, rtol=1e-3, atol=1e-3)
    assert 1 / 1.2 - 0.01 < down.min() < 0.87 and 1.2 < down.max() < 1 / 0.8 + 0.01
    assert -0.21 < shear.min() < -0.15 and 0.15 < shear.max() < 0.21
    assert 70 < (across < 0).sum() < 130
    assert (new[:, 2, centre, centre] - 1).abs().max() < 1e-5
    assert new[:, 2].min() == 0  # outside of a shrunk image: the mean colour


def test_crop_and_flip_gives_what_torchvision_can_give():
    """Each of 3 x 3 crops occurs, mirrored or not, and no other image."""
    torch.manual_seed(0)
    crop_and_flip = SETS["cinic_lab"].crop_and_flip
    image = torch.arange(1, 61, dtype=torch.uint8).view(3, 4, 5)
    padded, possible = F.pad(image, [1, 1, 1, 1]), set()
    for y in range(3):
        for x in range(3):
            crop = F.crop(padded, y, x, 4, 5)
            possible |= {str(crop.tolist()), str(F.hflip(crop).tolist())}
    new = crop_and_flip(image.expand(1000, -1, -1, -1), padding=1)
    assert new.dtype == torch.uint8 and new.shape == (1000, 3, 4, 5)
    counts = Counter(str(one.tolist()) for one in new)
    assert set(counts) == possible and len(possible) == 18
    assert min(counts.values()) > 25  # 56 on average
    assert (crop_and_flip(torch.ones(99, 1, 32, 32)) == 0).any()  # by default


def test_top1_and_top5_accuracy():
    top1_top5 = load("cinic_lab", "topk").top1_top5
    scores = torch.tensor([[9.0, 8, 7, 6, 5, 4]] * 4)
    first, five = top1_top5(scores, torch.tensor([0, 1, 4, 5]))
    assert first.tolist() == [True, False, False, False]
    assert five.tolist() == [True, True, True, False]
    sums = batch_sums(torch.tensor(2.0), first, five)
    expected = {"loss": 2.0, "acc1": 25.0, "acc5": 75.0}
    assert to_metrics(sums, "acc1", "acc5") == expected


# MNIST and CIFAR-100, which the scripts read as they are


def idx(*shape, value=0, kind=8):
    """Return a file as MNIST's are, of bytes that all have the same value.

    kind: of the numbers by the file's magic: 8 for bytes, 13 for floats.
    """
    head = struct.pack(f">4B{len(shape)}I", 0, 0, kind, len(shape), *shape)
    return head + bytes([value]) * int(np.prod(shape)) * (4 if kind == 13 else 1)


@pytest.mark.parametrize(
    "file, body, words",
    [
        ("train-labels-idx1-ubyte", idx(599), "599 labels"),
        ("t10k-images-idx3-ubyte", idx(100, 28, 27), "100 labels"),
        ("t10k-labels-idx1-ubyte", idx(100, value=10), "a label is 10"),
        ("t10k-labels-idx1-ubyte", b"half", "is damaged"),
        ("t10k-labels-idx1-ubyte", idx(100, kind=99), r"is damaged \(.+\)"),
        ("t10k-labels-idx1-ubyte", idx(100, kind=13), "torch.uint8"),
    ],
)
def test_invalid_mnist_files_are_an_error(file, body, words, sample, datadir):
    shutil.copytree(sample / "MNIST", datadir / "MNIST")
    train, test = SETS["mnist_multigpu"].mnist()
    assert train.images.shape == (600, 1, 28, 28) and len(test) == 100
    (datadir / "MNIST/raw" / file).write_bytes(body)
    with raises_user_error(words):
        SETS["mnist_multigpu"].mnist()


@pytest.fixture
def cifar(sample, datadir):
    """Return a function that writes and reads CIFAR-100's training file."""
    folder = datadir / "cifar-100-python"
    shutil.copytree(sample / folder.name, folder)

    def read(content):
        (folder / "train").write_bytes(content)
        return SETS["cifar100_demo"].cifar100()[0]

    return read


def pickled(labels=(0, 99), images=2, kind=np.uint8, protocol=2):
    data = np.arange(images * 3072).reshape(images, 3072).astype(kind)
    split = {"data": data, "fine_labels": list(labels), "filenames": ["a", "b"]}
    return pickle.dumps(split, protocol)


def test_cifar_is_read_from_any_pickle(cifar):
    for protocol in range(6):
        train = cifar(pickled(protocol=protocol))
        assert train.labels.tolist() == [0, 99]
        assert train.images.shape == (2, 3, 32, 32)
        assert train.images.flatten()[:3].tolist() == [0, 1, 2]
    content = pickled().replace(b"numpy._core.multiarray", b"numpy.core.multiarray")
    content = content[:-1] + b"U\1\xffK\1s."  # one more entry, named by bytes
    assert len(cifar(content)) == 2  # as Python 2 and NumPy 1 wrote the real one


def test_invalid_cifar_files_are_an_error(cifar):
    for content, words in (
        (pickled(labels=(1,)), "1 labels, 2 images"),
        (pickled(labels=(1, 100)), "not in 0..99"),
        (pickled(labels=(-1, 2)), "not in 0..99"),
        (pickled(kind=np.int64), "damaged"),
        (pickled(labels=(), images=0), "damaged"),
    ):
        with raises_user_error(words):
            cifar(content)


class Evil:
    def __init__(self, *call):
        self.call = call

    def __reduce__(self):
        return self.call


def test_pickles_run_no_code(cifar, tmp_path):
    ran = str(tmp_path / "ran")
    for protocol in (0, 2, 5):
        for what in ((os.mkdir, (ran,)), (np.save, (ran, 1))):
            with raises_user_error("it would call"):
                cifar(pickle.dumps({"data": Evil(*what)}, protocol))
    assert not list(tmp_path.glob("ran*"))


# One image file


def read(image, size=8, kind="PNG", **options):
    """Save an image with these options; return it as read by read_photo()."""
    file = io.BytesIO()
    image.save(file, kind, **options)
    return prepare.read_photo(file, size)


def test_each_kind_of_image_becomes_rgb():
    for mode, value, colour in (
        ("RGBA", (200, 100, 50, 255), (200, 100, 50)),
        ("CMYK", (55, 155, 205, 0), (200, 100, 50)),
        ("P", 2, (200, 100, 50)),
        ("L", 124, (124, 124, 124)),
        ("1", 1, (255, 255, 255)),
    ):
        image = Image.new(mode, (301, 203), value)
        if mode == "P":
            image.putpalette([0, 0, 0, 0, 0, 0, 200, 100, 50])
        pixels = read(image, kind="JPEG" if mode == "CMYK" else "PNG")
        assert pixels.shape == (3, 8, 8) and pixels.dtype == torch.uint8
        difference = pixels.int() - torch.tensor(colour).view(3, 1, 1)
        assert difference.abs().max() <= 3, mode


def test_a_photo_is_resized_as_by_torchvision(sample, tmp_path):
    for file in (sample / "dogs-vs-cats/train-2000/train/dogs").iterdir():
        whole = F.pil_to_tensor(Image.open(file))
        expected = F.resize(whole, [150, 150], antialias=True)
        difference = prepare.read_photo(file, 150).int() - expected
        assert difference.abs().max() <= 1
    ramp = np.linspace(0, 255, 1200)[None, :, None] * np.ones((900, 1, 3))
    Image.fromarray(ramp.astype(np.uint8)).save(tmp_path / "large.jpg")
    small = prepare.read_photo(tmp_path / "large.jpg", 150).float()
    expected = torch.linspace(0, 255, 150)  # libjpeg decoded an eighth of it
    assert (small.mean((0, 1)) - expected).abs().max() < 2


@pytest.mark.filterwarnings("ignore:Corrupt EXIF data")
def test_photos_are_rotated_by_their_exif_tag():
    image = Image.new("RGB", (64, 64))
    image.paste((255, 255, 255), (0, 0, 64, 16))  # a quarter, at the top
    # A TIFF header; two entries: the orientation, and a unit that is a fraction.
    exif = b"Exif\0\0II*\0" + struct.pack("<LH", 8, 2)
    exif += struct.pack("<HHLHH", 0x0112, 3, 1, 6, 0)
    odd = struct.pack("<HHLL3L", 0x0128, 5, 1, 38, 0, 1, 3)
    for kind, more in (("JPEG", b""), ("PNG", b""), ("JPEG", odd)):
        pixels = read(image, kind=kind, exif=exif + more)
        assert (pixels[:, :, 6:] > 200).all() and (pixels[:, :, :6] < 55).all()


# All files of a set


SPLITS, CLASSES = ("train", "test"), ("a", "b")


@pytest.fixture
def source(tmp_path):
    """Return a folder of 30 training and 20 test images, each in its own colour."""
    for split, count in zip(SPLITS, (30, 20), strict=True):
        for i in range(count):
            file = tmp_path / "images" / split / "ab"[2 * i // count] / f"{i:03}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (8, 8), (i, len(split), 7)).save(file)
    return tmp_path / "images"


@pytest.fixture
def target(datadir):
    (datadir / "set").mkdir(parents=True)
    return datadir / "set"


def prepare_and_load(source, target, **options):
    prepare.prepare(source, target, SPLITS, CLASSES, 8, **options)
    return load_prepared("set", SPLITS, 8, 2)


def test_each_split_is_one_file_that_processes_share(source, target):
    (source / "train/a/000.png").rename(source / "train/a/000.PNG")
    (source / "train/a/Thumbs.db").write_bytes(b"not an image")
    sets = prepare_and_load(source, target)
    assert names(target) == ["test-8.pt", "train-8.pt"]
    for images, count, name in zip(sets, (30, 20), SPLITS, strict=True):
        assert images.images.shape == (count, 3, 8, 8)
        assert images.images.dtype == torch.uint8
        assert images.images[:, 0, 4, 4].tolist() == [*range(count)]
        assert (images.images[:, 1] == len(name)).all()
        assert images.labels.tolist() == [0] * (count // 2) + [1] * (count // 2)
        assert f"{target}/{name}-8.pt" in Path("/proc/self/maps").read_text()
        batch, labels = images.__getitems__([count - 1, 3])
        assert batch[:, 0, 4, 4].tolist() == [count - 1, 3]
        assert labels.tolist() == [1, 0]
    (target / "test-8.pt").write_bytes(b"half")
    with raises_user_error("cannot read .*if it is damaged, delete it, and run"):
        load_prepared("set", SPLITS, 8, 2)
    (target / "test-8.pt").unlink()
    with raises_user_error("not prepared, it has no test-8.pt: run `python down"):
        load_prepared("set", SPLITS, 8, 2)
    with raises_user_error("no data in .*run `python download_data.py`"):
        load_prepared("another", SPLITS, 8, 2)


@pytest.mark.parametrize(
    "words, change",
    [
        ("images .*float32", {"images": torch.zeros(20, 3, 8, 8)}),
        ("images .*9, 9", {"images": torch.zeros(20, 3, 9, 9, dtype=torch.uint8)}),
        ("images .*20, 3, 8", {"labels": torch.zeros(10, dtype=torch.int64)}),
        ("labels are not from 0 to 1", {"labels": torch.full((20,), -100)}),
        ("labels are not from 0 to 1", {"labels": torch.full((20,), 2)}),
        ("labels are not from 0 to 1", {"labels": torch.zeros(20)}),
        ("NoneType", {"labels": None}),
    ],
)
def test_a_prepared_file_of_other_images_is_an_error(words, change, source, target):
    prepare_and_load(source, target)
    file = target / "test-8.pt"
    torch.save(torch.load(file) | change, file)
    with raises_user_error(f"cannot read {file} .*{words}.*: if it is damaged, del"):
        load_prepared("set", SPLITS, 8, 2)


def test_a_changed_prepared_file_is_an_error(source, target):
    prepare_and_load(source, target)
    file = target / "test-8.pt"
    body = bytearray(file.read_bytes())
    body[len(body) // 2] ^= 1
    file.write_bytes(body)
    with raises_user_error(f"cannot read {file} .*is damaged"):
        load_prepared("set", SPLITS, 8, 2)


def are_equal(folder, other):
    """Return whether two folders have the same prepared files."""
    pairs = [
        (torch.load(folder / f.name), torch.load(f)) for f in other.glob("*.pt")
    ]
    same = [torch.equal(new[key], old[key]) for new, old in pairs for key in old]
    return len(same) == 6 and all(same)


@pytest.mark.parametrize("kind", ["half.jpg", "half.png", "huge.png", "text.png"])
def test_unreadable_images_are_named_or_skipped(
    kind, source, target, monkeypatch, capsys
):
    bad = source / f"train/a/015-{kind}"  # between others
    Image.effect_noise((32, 32), 99).convert("RGB").save(bad)
    if kind == "huge.png":  # for Pillow
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    else:
        body = bad.read_bytes()
        bad.write_bytes(b"text" if kind == "text.png" else body[: len(body) // 2])
    (source / "train/a/000.png").write_bytes(b"")
    with raises_user_error("2 of 31 .* replace .*/000.png .*add --skip-bad"):
        prepare_and_load(source, target)
    assert names(target) == []
    train, _ = prepare_and_load(source, target, skip_bad=True)
    assert train.images[:, 0, 4, 4].tolist() == [*range(1, 30)]
    assert train.labels.tolist() == [0] * 14 + [1] * 15
    assert "train: 2 of 31 images cannot be read" in capsys.readouterr().out


def test_a_class_without_images_is_an_error(source, target):
    prepare_and_load(source, target)
    for file in (source / "test/b").iterdir():
        file.write_bytes(b"")
    with raises_user_error("none of b can be read: replace .*test/b/010.png"):
        prepare_and_load(source, target, skip_bad=True)
    for file in target.iterdir():
        file.unlink()
    shutil.rmtree(source / "train/b")
    (source / "train/b").mkdir()
    with raises_user_error(r"no images in .*train/b"):
        prepare_and_load(source, target)
    assert names(target) == []


def test_synthetic_images_are_prepared(photos, sample):
    assert [len(split) for split in photos] == [40, 20, 120]
    for split in photos:
        half = len(split) // 2
        assert split.labels.tolist() == [0.0] * half + [1.0] * half
        assert split.images.shape[1:] == (3, 150, 150)
    train, valid, test = SETS["cinic_lab"].cinic()
    assert [len(part) for part in (train, valid, test)] == [100, 20, 20]
    images, labels = train.__getitems__([0, 99])
    assert labels.tolist() == [0, 9] and labels.dtype == torch.int64
    for i, name in ((0, "airplane/train-0.png"), (1, "truck/train-9.png")):
        pixels = np.asarray(Image.open(sample / "CINIC/CINIC-10/train" / name))
        assert (images[i].permute(1, 2, 0).numpy() == pixels).all()


# Downloads


@pytest.fixture
def server():
    """Return a server of .files that .breaks off and records .ranges."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            if self.path not in server.files:
                return self.send_error(404)
            body, wanted = server.files[self.path], self.headers.get("Range")
            start = int(wanted.removeprefix("bytes=").split("-")[0])
            server.ranges.append(start)
            if not server.resumes:
                start = 0
            elif start >= len(body):
                return self.send_error(416)
            self.send_response(206 if server.resumes else 200)
            if server.tells_length:
                self.send_header("Content-Length", str(len(body) - start))
            self.end_headers()
            stop = server.breaks.pop() if server.breaks else len(body)
            self.wfile.write(body[start : start + stop])

        def log_message(self, *args):
            pass

    server = ThreadingHTTPServer(("localhost", 0), Handler)
    server.files, server.breaks, server.ranges, server.resumes = {}, [], [], True
    server.tells_length = True
    server.url = f"http://localhost:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize("resumes", [True, False])
def test_fetch_resumes(server, tmp_path, resumes):
    body = bytes(range(256)) * 10000
    server.files["/file"], server.breaks, server.resumes = body, [1000000], resumes
    fetch = partial(download.fetch, f"{server.url}/file", tmp_path / "file")
    with raises_user_error("broke off: run the command again|IncompleteRead"):
        fetch()
    assert names(tmp_path) == ["file.part"]
    fetch(hashlib.sha256(body).hexdigest()[:8], algorithm="sha256")
    assert (tmp_path / "file").read_bytes() == body
    assert server.ranges == [0, 1000000] and names(tmp_path) == ["file"]
    (tmp_path / "file").rename(tmp_path / "file.part")
    fetch()  # of what is complete already
    assert (tmp_path / "file").read_bytes() == body


def test_fetch_refuses_a_wrong_checksum(server, tmp_path):
    server.files["/file"], server.tells_length, server.breaks = b"some", False, [2]
    md5 = hashlib.md5(b"some").hexdigest()
    fetch = partial(download.fetch, f"{server.url}/file", tmp_path / "file", md5)
    with raises_user_error("failed its checksum"):  # the server says no length
        fetch()
    assert names(tmp_path) == []
    fetch()
    assert (tmp_path / "file").read_bytes() == b"some"


def test_a_missing_server_is_an_error(server, datadir):
    for url in (NOWHERE, "nonsense", f"{server.url}/none"):
        with raises_user_error("login node"):
            download.fetch(url, datadir / "file")
    for module in DOWNLOADS.values():
        with raises_user_error("login node"):
            call(module, "--url", NOWHERE)
    assert not list(datadir.glob("*/*"))


def test_vgg16_is_downloaded_and_converted(server, tmp_path, monkeypatch):
    body = b"the weights"
    file = tmp_path / f"hub/vgg16-{hashlib.sha256(body).hexdigest()[:8]}.pth"
    monkeypatch.setitem(WEIGHTS.WEIGHTS, "vgg16", file)
    server.files["/weights"] = b"others"
    with raises_user_error("failed its checksum"):
        call(WEIGHTS, "--url", f"{server.url}/weights")
    server.files["/weights"] = body
    call(WEIGHTS, "--url", f"{server.url}/weights")
    assert file.read_bytes() == body
    call(WEIGHTS, "--url", NOWHERE)  # it is there already


def photo_archive(cats=1505, dogs=1503):
    """Return a zip like Microsoft's, of small photos, two of them corrupt."""
    buffer, photo = io.BytesIO(), io.BytesIO()
    Image.new("RGB", (8, 8)).save(photo, "JPEG")
    with zipfile.ZipFile(buffer, "w") as archive:
        for folder, count in (("Cat", cats), ("Dog", dogs)):
            archive.writestr(f"PetImages/{folder}/Thumbs.db", b"not a photo")
            for i in range(count):
                body = b"" if i == 666 else photo.getvalue()
                archive.writestr(f"PetImages/{folder}/{i}.jpg", body)
    return buffer.getvalue()


def test_dogs_vs_cats_is_downloaded_and_split(server, datadir, capsys):
    url = "--url", f"{server.url}/photos.zip"
    for other in (b"<html>sorry</html>", photo_archive(20)):
        server.files["/photos.zip"] = other
        with raises_user_error("not the archive"):
            call(PHOTOS, *url)
        assert names(datadir / "dogs-vs-cats") == []
    server.files["/photos.zip"] = photo_archive()
    call(PHOTOS, *url)
    folder = datadir / "dogs-vs-cats"
    kinds = product(SETS["exercise8"].SPLITS, SETS["exercise8"].CLASSES)
    count = [len(names(folder / "train-2000" / s / kind)) for s, kind in kinds]
    assert count == [1000, 1000, 500, 500, 4, 2]
    assert (folder / "train-2000/train/cats/cat.1000.jpg").exists()  # not 666
    files = ["test-150.pt", "train-150.pt", "train-2000", "validation-150.pt"]
    assert names(folder) == files
    sets = SETS["exercise8"].dogs_vs_cats()
    assert [len(split) for split in sets] == [2000, 1000, 6]
    call(PHOTOS, "--url", NOWHERE)
    assert "is there already" in capsys.readouterr().out


def cinic_archive():
    """Return a tar.gz like Edinburgh's: an image of each class in each split."""
    buffer, rng = io.BytesIO(), np.random.default_rng(0)
    folders = product(SETS["cinic_lab"].SPLITS, SETS["cinic_lab"].CLASSES)
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for split, name in folders:
            noise = rng.integers(0, 256, (32, 32, 3), dtype=np.uint8)
            image = io.BytesIO()
            Image.fromarray(noise).save(image, "PNG")
            member = tarfile.TarInfo(f"./{split}/{name}/cifar10-1.png")
            member.size = image.tell()
            image.seek(0)
            archive.addfile(member, image)
    return buffer.getvalue()


def test_cinic_is_downloaded_and_prepared(server, datadir, monkeypatch, capsys):
    body = server.files["/cinic.tar.gz"] = cinic_archive()
    url = "--url", f"{server.url}/cinic.tar.gz"
    with raises_user_error("failed its checksum"):  # it is not Edinburgh's
        call(CINIC, *url)
    assert names(datadir / "CINIC") == []
    monkeypatch.setattr(CINIC, "MD5", hashlib.md5(body).hexdigest())
    call(CINIC, *url)
    files = ["CINIC-10", "test-32.pt", "train-32.pt", "valid-32.pt"]
    assert names(datadir / "CINIC") == files
    sets = SETS["cinic_lab"].cinic()
    assert [part.labels.tolist() for part in sets] == [[*range(10)]] * 3
    call(CINIC, "--url", NOWHERE)
    assert "is there already" in capsys.readouterr().out


def test_torchvision_data_are_downloaded(sample, datadir, tmp_path, monkeypatch):
    site, sums = tmp_path / "site", []
    site.mkdir()
    for file in sorted((sample / "MNIST/raw").iterdir()):
        body = gzip.compress(file.read_bytes())
        (site / f"{file.name}.gz").write_bytes(body)
        sums.append((f"{file.name}.gz", hashlib.md5(body).hexdigest()))
    monkeypatch.setattr(MNIST, "mirrors", MNIST.mirrors)  # restored at the end
    with serving(site) as url:
        with raises_user_error("no complete MNIST .*try on a login node"):
            call(DOWNLOADS["mnist_multigpu"], "--url", url)  # these are others
        assert names(datadir) == []
        monkeypatch.setattr(MNIST, "resources", sums)
        call(DOWNLOADS["mnist_multigpu"], "--url", url)
    assert [len(split) for split in SETS["mnist_multigpu"].mnist()] == [600, 100]
    assert names(datadir) == ["MNIST"]
    call(DOWNLOADS["mnist_multigpu"], "--url", NOWHERE)  # is there already


# From a folder, and where one may not read or write


def test_data_are_taken_from_a_folder(sample, datadir, tmp_path):
    """Image files, their parent folder and DATADIR give the same data."""
    raw = sample / "CINIC/CINIC-10"
    shutil.copytree(raw, datadir / "CINIC/CINIC-10")
    for options in (["--from", raw], ["--from", sample], ["--url", NOWHERE]):
        for file in (datadir / "CINIC").glob("*.pt"):
            file.unlink()
        call(CINIC, *options)
        assert are_equal(datadir / "CINIC", sample / "CINIC")
    changed = datadir / "CINIC/CINIC-10/train/airplane/train-0.png"
    Image.new("RGB", (32, 32), (1, 2, 3)).save(changed)
    call(CINIC, "--from", datadir / "CINIC")  # prepares them again
    first = SETS["cinic_lab"].cinic()[0].images[0]
    assert first[:, 5, 5].tolist() == [1, 2, 3]
    for module in DOWNLOADS.values():
        with raises_user_error("nowhere"):
            call(module, "--from", tmp_path / "nowhere")


@needs_root
def test_read_only_data_can_be_used(sample, public, monkeypatch):
    """In DATADIR they are an error; with --from they are used."""
    shared, ignore = public / "shared", shutil.ignore_patterns("*.pt")
    shutil.copytree(sample, shared, ignore=ignore)
    for folder in (shared, *shared.rglob("*/")):
        folder.chmod(0o555)
    # Synthetic data have other checksums.
    for check in ("CIFAR100._check_integrity", "cifar.check_integrity"):
        monkeypatch.setattr(f"torchvision.datasets.{check}", lambda *args: True)
    for name in ("latin1", "hex"):  # nobody may not read where Python lies
        codecs.lookup(name)

    def as_student():
        monkeypatch.setenv("DATADIR", str(shared))
        with raises_user_error("cannot write .*: make its folder writable"):
            call(CINIC)
        monkeypatch.setenv("DATADIR", str(public / "mine"))
        for exercise in ("cinic_lab", "mnist_multigpu", "cifar100_demo"):
            call(DOWNLOADS[exercise], "--from", shared)
        assert len(SETS["cinic_lab"].cinic()[0]) == 100
        assert len(SETS["mnist_multigpu"].mnist()[0]) == 600
        assert len(SETS["cifar100_demo"].cifar100()[0]) == 500

    as_nobody(as_student)


@needs_root
def test_unreadable_data_are_a_user_error(sample, public, monkeypatch):
    """One line says so before a download, and not that they are damaged."""
    closed, url = public / "closed", ("--url", NOWHERE)
    shutil.copytree(sample, public / "sample")
    (public / "sample").chmod(0o755)
    (public / "sample/hub").mkdir()
    for folder in ("MNIST", "CINIC", "cifar-100-python", "dogs-vs-cats"):
        (closed / folder).mkdir(parents=True)
    backbones = load("exercise8", "backbones")
    monkeypatch.setitem(backbones.WEIGHTS, "vgg16", public / "sample/hub/vgg16.pth")
    readers = {
        "sample/MNIST/raw/train-images-idx3-ubyte": SETS["mnist_multigpu"].mnist,
        "sample/cifar-100-python/train": SETS["cifar100_demo"].cifar100,
        "sample/CINIC/train-32.pt": SETS["cinic_lab"].cinic,
        "sample/hub/vgg16.pth": partial(backbones.load_features, "vgg16"),
    }
    photo = public / "sample/CINIC/CINIC-10/train/cat/train-0.png"
    for file in (closed, photo, *(public / name for name in readers)):
        file.touch()
        file.chmod(0)
    calls = [("mine", module, ("--from", closed)) for module in DOWNLOADS.values()]
    calls += [("closed", module, url) for module in DOWNLOADS.values()]
    calls += [("mine", CINIC, ("--skip-bad", "--from", public / "sample"))]

    def as_student():
        monkeypatch.setenv("DATADIR", str(public / "sample"))
        for read in readers.values():
            with raises_user_error("^cannot read .*(Permission|if it is damaged)"):
                read()
        monkeypatch.setitem(WEIGHTS.WEIGHTS, "vgg16", closed / "vgg16-1.pth")
        with raises_user_error("Permission denied"):
            call(WEIGHTS, *url)
        for datadir, module, options in calls:
            monkeypatch.setenv("DATADIR", str(public / datadir))
            with raises_user_error("Permission denied"):
                call(module, *options)

    as_nobody(as_student)
    closed.chmod(0o755)


# Kills, and a full disk


def kill_at_call(function, owner, name, last, before=lambda *args: None):
    """Run a function in a new process, and kill it at this call of owner.name."""
    calls, original = [], getattr(owner, name)

    def counted(*args, **options):
        calls.append(args)
        if len(calls) == last:
            before(*args)
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, counted)
        child = multiprocessing.get_context("fork").Process(target=function)
        child.start()
        child.join()
    assert child.exitcode == -signal.SIGKILL


def test_a_kill_while_saving_leaves_no_partial_file(source, target):
    again = partial(prepare_and_load, source, target)

    def write_half(state, file):
        Path(file).write_bytes(b"half")

    kill_at_call(again, torch, "save", 2, write_half)
    assert (target / "train-8.pt").exists() and not (target / "test-8.pt").exists()
    assert [len(part) for part in again()] == [30, 20]
    assert names(target) == ["test-8.pt", "train-8.pt"]


def test_a_kill_while_unpacking_is_recovered(server, datadir, monkeypatch):
    body = server.files["/c.tar.gz"] = cinic_archive()
    monkeypatch.setattr(CINIC, "MD5", hashlib.md5(body).hexdigest())
    again = partial(call, CINIC, "--url", f"{server.url}/c.tar.gz")
    kill_at_call(again, tarfile.TarFile, "makefile", 25)
    assert len(list(datadir.rglob("*.png"))) == 24
    again()  # and does not take the 24 for all
    assert server.ranges == [0]
    assert [len(part) for part in SETS["cinic_lab"].cinic()] == [10, 10, 10]
    assert not list(datadir.rglob("*.part"))


@pytest.mark.parametrize("exercise", ["exercise8", "cinic_lab"])
def test_synthetic_data_are_reproducible(exercise, sample, tmp_path):
    """They are the same each time, even after kills while making and preparing."""
    module, name = load(exercise, "sample_data"), SETS[exercise].NAME
    again = partial(call, module, "--to", tmp_path)
    kill_at_call(partial(again, "--scale", 0.1), Image.Image, "save", 50)
    kill_at_call(partial(again, "--scale", 0.1), torch, "save", 2)
    again()
    assert names(tmp_path) == [name] and are_equal(tmp_path / name, sample / name)
    for scale in (0, "1e9", "nan", "much"):
        with raises_user_error("--scale"):
            again(f"--scale={scale}")
    (tmp_path / "file").write_text("")
    with raises_user_error("use another --to"):
        again("--to", tmp_path / "file/x")


@pytest.fixture
def small_disk(tmp_path):
    """Return a function that resizes a disk to a size in KB; it keeps its files."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "none", disk]).returncode != 0:
        pytest.skip("no disk may be mounted here")

    def resize(size):
        options = f"remount,size={size}k"
        subprocess.run(["mount", "-o", options, "none", disk], check=True)
        return disk

    yield resize
    subprocess.run(["umount", "--lazy", disk], check=True)


@needs_root
def test_a_full_disk_is_a_user_error(small_disk, server, sample, monkeypatch):
    """During download, unpacking, making, preparing and copying: one line."""
    full = partial(raises_user_error, "disk (is )?full.*make room")
    body = server.files["/c.tar.gz"] = cinic_archive()  # 96 KB
    monkeypatch.setattr(CINIC, "MD5", hashlib.md5(body).hexdigest())
    url = "--url", f"{server.url}/c.tar.gz"
    disk = small_disk(40)
    monkeypatch.setenv("DATADIR", str(disk))
    with full():
        call(CINIC, *url)
    assert names(disk / "CINIC") == ["c.tar.gz.part"]
    small_disk(120)
    with full():
        call(CINIC, *url)
    assert names(disk / "CINIC") == ["c.tar.gz"]
    small_disk(300)
    call(CINIC, *url)
    assert len(server.ranges) == 2 and server.ranges[1] > 0  # it went on
    assert [len(part) for part in SETS["cinic_lab"].cinic()] == [10, 10, 10]
    shutil.rmtree(disk / "CINIC")
    again = partial(call, load("cinic_lab", "sample_data"), "--scale", 0.1)
    small_disk(200)
    with full():
        again("--to", disk)
    assert names(disk) == []
    small_disk(700)
    with full():
        again("--to", disk)
    assert names(disk / "CINIC") == ["CINIC-10"]
    shutil.rmtree(disk / "CINIC")
    small_disk(200)
    for exercise in ("mnist_multigpu", "cifar100_demo"):
        with full():
            call(DOWNLOADS[exercise], "--from", sample)
        assert names(disk) == []
