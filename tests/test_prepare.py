"""Images in files become a file for each split, whole, or one line says why."""

import codecs
import errno
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import conftest
import numpy as np
import pytest
import torch
from conftest import REPOSITORY, as_nobody, call, copy_room, load, mistake
from PIL import Image

from common import prepare
from common.cli import UserError
from common.data import load_prepared

SPLITS, CLASSES = ("train", "test"), ("a", "b")


@pytest.fixture
def source(tmp_path):
    """Image files: 30 to train on, 20 to test on, each of a colour of its own."""
    for split, count in zip(SPLITS, (30, 20), strict=True):
        for i in range(count):
            file = tmp_path / "images" / split / "ab"[2 * i // count] / f"{i:03}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (8, 8), (i, len(split), 7)).save(file)
    return tmp_path / "images"


@pytest.fixture
def target(tmp_path, monkeypatch):
    monkeypatch.setenv("DATADIR", str(tmp_path))
    (tmp_path / "set").mkdir()
    return tmp_path / "set"


def do(source, target, **options):
    prepare.prepare(source, target, SPLITS, CLASSES, 8, **options)
    return load_prepared("set", SPLITS, 8)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def mapping(file):
    """Return what the system says of a mapped file: {"Anonymous": KB, ...}."""
    maps = Path("/proc/self/smaps").read_text()
    (text,) = re.findall(rf"{file}\n(.*?)VmFlags", maps, re.S)
    return {name: int(kb) for name, kb in re.findall(r"(\w+): +(\d+) kB", text)}


def test_a_file_for_each_split_that_processes_share(source, target, capsys):
    train, test = do(source, target)
    assert "Preparing 50 images: 0.0 MB\n" in capsys.readouterr().out
    assert names(target) == ["test-8.pt", "train-8.pt"]
    for images, count, name in ((train, 30, "train"), (test, 20, "test")):
        assert images.images.shape == (count, 3, 8, 8)
        assert images.images.dtype == torch.uint8
        assert images.images[:, 0, 4, 4].tolist() == list(range(count))
        assert (images.images[:, 1] == len(name)).all()
        assert images.labels.tolist() == [0] * (count // 2) + [1] * (count // 2)
        # It is mapped, and reading a batch copies nothing of it.
        images.__getitems__(range(count))
        assert mapping(target / f"{name}-8.pt")["Anonymous"] == 0
    before = [file.stat().st_mtime_ns for file in target.iterdir()]
    do(source, target)  # they are there already
    assert before == [file.stat().st_mtime_ns for file in target.iterdir()]
    (target / "test-8.pt").unlink()  # a call that was killed in between goes on
    do(source, target)
    assert "Preparing 20 images" in capsys.readouterr().out
    assert names(target) == ["test-8.pt", "train-8.pt"]


@pytest.mark.parametrize("kind", ["half a jpg", "half a png", "middle", "text", ""])
def test_an_image_that_cannot_be_read(kind, source, target, capsys):
    noise = np.random.default_rng(0).integers(0, 255, (32, 32, 3), dtype=np.uint8)
    file = source / "train/a" / ("bad.jpg" if "jpg" in kind else "bad.png")
    Image.fromarray(noise).save(file)
    body = file.read_bytes()
    if "half" in kind:
        body = body[: len(body) // 2]
    elif kind == "middle":
        body = body[:41] + bytes(200) + body[241:]
    else:
        body = kind.encode()
    file.write_bytes(body)
    with pytest.raises(UserError, match="1 of 31 images cannot be read") as error:
        do(source, target)
    assert "\n" not in str(error.value)
    assert str(file) in str(error.value) and "--skip-bad" in str(error.value)
    assert names(target) == []
    train, _ = do(source, target, skip_bad=True)
    assert train.images[:, 0, 4, 4].tolist() == list(range(30))
    assert train.labels.sum() == 15 and len(train) == 30
    said = "train-8.pt: 1 of 31 images cannot be read and will be missing"
    assert said in capsys.readouterr().out


def test_many_that_cannot_be_read_are_still_one_line(source, target):
    for file in (source / "test/b").iterdir():
        file.write_bytes(b"")
    with pytest.raises(UserError, match=r"10 of 20 .* \.\.\., or add") as error:
        do(source, target)
    assert str(error.value).count(".png") == 5


def test_a_class_without_images(source, target):
    shutil.rmtree(source / "test/b")
    (source / "test/b").mkdir()
    (source / "test/b/Thumbs.db").write_bytes(b"not an image")
    with pytest.raises(UserError, match=r"no images in .*test/b"):
        do(source, target)
    assert names(target) == []


def test_no_space(source, target):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3000, limits[1]))
    try:
        with pytest.raises(UserError, match=r"cannot save .*make room") as error:
            do(source, target)
        assert "\n" not in str(error.value)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert names(target) == []
    assert len(do(source, target)[0]) == 30


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize("exercise", ["exercise8", "cifar100_demo"])
def test_data_that_others_may_only_read(exercise, sample, public, monkeypatch):
    """With DATADIR there: what to type. With it elsewhere: the data are taken."""
    module, dataset = load(exercise, "download_data"), load(exercise, "dataset")
    name = getattr(dataset, "NAME", "cifar-100-python")
    get = getattr(dataset, "dogs_vs_cats", None) or dataset.cifar100
    shared = public / "shared"
    ignore = shutil.ignore_patterns("*.pt")
    shutil.copytree(sample / name, shared / name, ignore=ignore)
    for folder in (shared, *shared.rglob("*/")):
        folder.chmod(0o555)
    (shared / "private").mkdir(mode=0o700)
    if exercise == "cifar100_demo":  # drawings have other sums
        for check in ("CIFAR100._check_integrity", "cifar.check_integrity"):
            monkeypatch.setattr(f"torchvision.datasets.{check}", lambda *args: True)

    codecs.lookup("latin1")  # nobody may not read where Python lies

    def as_student():
        if exercise == "exercise8":
            monkeypatch.setenv("DATADIR", str(shared))
            with mistake(r"cannot write .* `export DATADIR=FOLDER`.*--from"):
                call(module)
        monkeypatch.setenv("DATADIR", str(public / "mine"))
        call(module, "--from", shared)
        call(module, "--from", shared)  # is there already
        monkeypatch.setenv("DATADIR", str(shared / "private/x"))
        with mistake("no data"):
            get()

    as_nobody(as_student)
    monkeypatch.setenv("DATADIR", str(public / "mine"))
    assert len(get()[0]) == (40 if exercise == "exercise8" else 500)


def test_the_part_that_a_killed_call_left_goes(source, target):
    (target / "train-8.pt.123.part").write_bytes(b"half")
    (target / "train-8.pt.456.part").write_bytes(b"another call's, at work now")
    hour_ago = time.time() - 3600
    os.utime(target / "train-8.pt.123.part", (hour_ago, hour_ago))
    do(source, target)
    part = "train-8.pt.456.part"
    assert names(target) == ["test-8.pt", "train-8.pt", part]


@pytest.mark.parametrize("exercise", ["exercise8", "cinic_lab"])
def test_drawings_that_are_not_prepared_yet(exercise, sample, tmp_path):
    dataset = load(exercise, "dataset")
    shutil.copytree(sample / dataset.NAME, tmp_path / dataset.NAME)
    for file in (tmp_path / dataset.NAME).glob("*.pt"):
        file.unlink()
    call(load(exercise, "sample_data"), "--to", tmp_path)
    assert len(list((tmp_path / dataset.NAME).glob("*.pt"))) == 3
    for scale in (0, -1, "1e9", "nan", "inf", "much", "10" * 30):
        with mistake("--scale"):
            call(load(exercise, "sample_data"), "--to", tmp_path, f"--scale={scale}")
    (tmp_path / "file").write_text("")
    with mistake("type another --to"):
        call(load(exercise, "sample_data"), "--to", tmp_path / "file/x")


def test_a_large_photo_is_decoded_small_and_still_right(tmp_path):
    ramp = np.linspace(0, 255, 1200)[None, :, None] * np.ones((900, 1, 3))
    Image.fromarray(ramp.astype(np.uint8)).save(tmp_path / "ramp.jpg")
    small = prepare.read_photo(tmp_path / "ramp.jpg", 150).float()
    expected = torch.linspace(0, 255, 150)
    assert (small.mean((0, 1)) - expected).abs().max() < 2


def test_a_photo_is_what_pillow_makes_of_it(sample):
    file = next((sample / "dogs-vs-cats/train-2000/train/dogs").iterdir())
    whole = Image.open(file).resize((150, 150), Image.BILINEAR)
    photo = prepare.read_photo(file, 150).permute(1, 2, 0)
    difference = photo.numpy().astype(int) - np.asarray(whole)
    assert abs(difference).mean() < 2  # of 255: draft() decoded it at another size


@pytest.mark.parametrize("mode", ["L", "CMYK", "RGBA", "P"])
def test_every_kind_of_image_becomes_rgb(mode, tmp_path):
    image = Image.new("RGB", (50, 80), (10, 200, 90)).convert(mode)
    image.save(tmp_path / "image", "PNG" if mode in ("RGBA", "P") else "JPEG")
    assert prepare.read_photo(tmp_path / "image", 20).shape == (3, 20, 20)


def test_an_image_of_another_size_is_resized(tmp_path):
    Image.new("RGB", (50, 40), (9, 8, 7)).save(tmp_path / "odd.png")
    image = prepare.read_photo(tmp_path / "odd.png", 32)
    assert image.shape == (3, 32, 32) and image[:, 16, 16].tolist() == [9, 8, 7]


def test_drawings_are_prepared(sample, monkeypatch):
    monkeypatch.setenv("DATADIR", str(sample))
    photos = load("exercise8", "dataset").dogs_vs_cats()
    assert [len(split) for split in photos] == [40, 20, 120]
    for split in photos:
        half = len(split) // 2
        assert split.labels.tolist() == [0.0] * half + [1.0] * half
        assert split.images.shape[1:] == (3, 150, 150)
    folder = sample / "dogs-vs-cats/train-2000/validation/dogs"
    last = prepare.read_photo(sorted(folder.iterdir())[-1], 150)
    assert torch.equal(photos[1].images[-1], last)
    train, valid, test = load("cinic_lab", "dataset").cinic()
    assert [len(part) for part in (train, valid, test)] == [100, 20, 20]
    images, labels = train.__getitems__([0, 99])
    assert labels.tolist() == [0, 9] and labels.dtype == torch.int64
    for i, name in ((0, "airplane/train-0.png"), (1, "truck/train-9.png")):
        pixels = np.asarray(Image.open(sample / "CINIC/CINIC-10/train" / name))
        assert (images[i].permute(1, 2, 0).numpy() == pixels).all()


@pytest.mark.parametrize("exercise", ["exercise8", "cinic_lab"])
def test_from_a_folder_that_is_only_read(exercise, sample, tmp_path, monkeypatch):
    """From the images, a folder above, or with them in DATADIR: all the same."""
    dataset, module = load(exercise, "dataset"), load(exercise, "download_data")
    raw = sample / dataset.NAME / dataset.RAW
    before = sorted(raw.rglob("*"))
    expected = None
    for i, source in enumerate((raw, raw.parent, raw.parent.parent, None)):
        root = tmp_path / str(i)
        monkeypatch.setenv("DATADIR", str(root))
        if source:
            call(module, "--from", source)
        else:
            shutil.copytree(raw, root / dataset.NAME / dataset.RAW)
            call(module, "--url", "http://localhost:1/never")
        files = sorted(f.name for f in (root / dataset.NAME).glob("*.pt"))
        bodies = [torch.load(root / dataset.NAME / name) for name in files]
        assert len(bodies) == 3
        expected = expected or bodies
        for body, other in zip(bodies, expected, strict=True):
            assert torch.equal(body["images"], other["images"])
            assert torch.equal(body["labels"], other["labels"])
    assert sorted(raw.rglob("*")) == before
    monkeypatch.setenv("DATADIR", str(tmp_path / "new"))
    with pytest.raises(UserError, match=r"no train/.* in .*nowhere"):
        call(module, "--from", tmp_path / "nowhere")
    assert not (tmp_path / "new").exists()


def test_killed_in_the_middle(tmp_path, sample):
    """Nothing has its name before it is whole, and the next call goes on."""
    room, root = copy_room("exercise8", tmp_path), tmp_path / "data"
    raw = root / "dogs-vs-cats/train-2000"
    shutil.copytree(sample / "dogs-vs-cats/train-2000", raw)
    for i in range(600):
        file = raw / "test/dogs/dog.0.jpg"
        (raw / f"test/dogs/more{i}.jpg").symlink_to(file)
    command = [sys.executable, "download_data.py"]
    env = {**os.environ, "DATADIR": str(root)}
    child = subprocess.Popen(command, cwd=room, env=env)
    deadline = time.monotonic() + 60
    while not (raw.parent / "validation-150.pt").exists():
        assert time.monotonic() < deadline and child.poll() is None
        time.sleep(0.005)
    child.kill()
    child.wait()
    assert not (raw.parent / "test-150.pt").exists()
    done = subprocess.run(command, cwd=room, env=env, capture_output=True, text=True)
    assert done.returncode == 0 and "Preparing 720 images" in done.stdout
    assert len(torch.load(raw.parent / "test-150.pt")["labels"]) == 720
    assert (room / "common").resolve() == REPOSITORY / "common"


@pytest.mark.parametrize("exercise", conftest.WITH_DATA)
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_disk_that_is_full_while_drawing(exercise, number, tmp_path, monkeypatch):
    module = load(exercise, "sample_data")

    def full(*args, **options):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(Path, "write_bytes", full)
    monkeypatch.setattr(Image.Image, "save", full)
    with mistake("the disk is full, make room"):
        call(module, "--to", tmp_path, "--scale", 0.01)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("exercise", ["exercise8", "cinic_lab"])
def test_a_disk_that_is_full_while_preparing(exercise, tmp_path, monkeypatch):
    def full(state, part):
        Path(part).write_bytes(b"half")
        raise RuntimeError("unexpected pos 704 vs 598")  # what torch says of it

    monkeypatch.setattr(torch, "save", full)
    for _ in range(2):  # what is drawn stays
        with mistake(r"disk full\? make room"):
            call(load(exercise, "sample_data"), "--to", tmp_path, "--scale", 0.01)
        assert not list(tmp_path.rglob("*.part")) + list(tmp_path.rglob("*.pt"))
        assert len(list(tmp_path.rglob("*.??g"))) > 5
