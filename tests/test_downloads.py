"""download_data.py and download_weights.py, from a local server or a folder."""

import hashlib
import io
import os
import pickle
import shutil
import zipfile
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import WITH_DATA, call, load, raises_user_error, serving
from PIL import Image
from torchvision.datasets import cifar
from torchvision.models._api import Weights, WeightsEnum

SETS = {exercise: load(exercise, "dataset") for exercise in WITH_DATA}
DOWNLOADS = {exercise: load(exercise, "download_data") for exercise in WITH_DATA}
WEIGHTS = load("exercise8", "download_weights")


@pytest.fixture
def datadir(tmp_path, monkeypatch):
    """Return an empty DATADIR."""
    monkeypatch.setenv("DATADIR", str(tmp_path / "data"))
    return tmp_path / "data"


@pytest.fixture
def server(tmp_path):
    """Return a folder and the address at which a server has its files."""
    (tmp_path / "served").mkdir()
    with serving(tmp_path / "served") as address:
        yield tmp_path / "served", address


def test_vgg16_is_downloaded_and_checked(server, tmp_path, monkeypatch):
    served, address = server
    buffer = io.BytesIO()
    torch.save({"features.0.bias": torch.zeros(64)}, buffer)
    name = f"vgg16-{hashlib.sha256(buffer.getvalue()).hexdigest()[:8]}.pth"

    class Served(WeightsEnum):
        IMAGENET1K_V1 = Weights(f"{address}/{name}", None, {})

    monkeypatch.setattr(WEIGHTS, "VGG16_Weights", Served)
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    with raises_user_error("404.*: try again, on a login node"):
        call(WEIGHTS)
    (served / name).write_bytes(b"<html>sorry</html>")
    with raises_user_error("cannot download .*RuntimeError: invalid hash"):
        call(WEIGHTS)
    assert os.listdir(tmp_path / "hub/checkpoints") == []
    (served / name).write_bytes(buffer.getvalue())
    call(WEIGHTS)
    assert os.listdir(tmp_path / "hub/checkpoints") == [name]


def photo_archive(count):
    """Return a zip like Microsoft's, of so many small photos of each animal.

    In any order, with other files among them, and photo 666 is empty.
    """
    buffer, photo = io.BytesIO(), io.BytesIO()
    Image.new("RGB", (8, 8)).save(photo, "JPEG")
    with zipfile.ZipFile(buffer, "w") as archive:
        for folder in ("Cat", "Dog"):
            archive.writestr(f"PetImages/{folder}/Thumbs.db", b"not a photo")
            for i in reversed(range(count)):
                body = b"" if i == 666 else photo.getvalue()
                archive.writestr(f"PetImages/{folder}/{i}.jpg", body)
    return buffer.getvalue()


def test_dogs_vs_cats_is_downloaded_and_split(server, datadir):
    """Nobody publishes a checksum; what does not unpack whole is not kept."""
    served, address = server
    url, whole = ("--url", f"{address}/photos.zip"), photo_archive(1505)
    folder = datadir / "dogs-vs-cats"
    for other, reason in (
        (whole[:-2000], "BadZipFile"),
        (photo_archive(20), "only 20 photos of cats"),
    ):
        (served / "photos.zip").write_bytes(other)
        line = f"cannot download .*photos.zip .*{reason}.*: try again, on a login"
        with raises_user_error(line):
            call(DOWNLOADS["exercise8"], *url)
        assert os.listdir(folder) == []
    (served / "photos.zip").write_bytes(whole)
    call(DOWNLOADS["exercise8"], *url)
    files = ["test.pt", "train-2000", "train.pt", "validation.pt"]
    assert sorted(os.listdir(folder)) == files
    for animal in ("cat", "dog"):
        train, validation, test = (
            os.listdir(folder / "train-2000" / split / f"{animal}s")
            for split in SETS["exercise8"].SPLITS
        )
        assert (len(train), len(validation)) == (1000, 500)
        assert sorted(test) == [f"{animal}.{i}.jpg" for i in range(1501, 1505)]
    (served / "photos.zip").unlink()
    call(DOWNLOADS["exercise8"], *url)  # the photos are there already


def test_cinic_is_downloaded_and_prepared(server, tmp_path, datadir, monkeypatch):
    """From a tar.gz like Edinburgh's, with an image of each class in each split."""
    served, address = server
    module, data = DOWNLOADS["cinic_lab"], SETS["cinic_lab"]
    for split, name in product(data.SPLITS, data.CLASSES):
        folder = tmp_path / "images" / split / name
        folder.mkdir(parents=True)
        Image.new("RGB", (32, 32)).save(folder / "cifar10-1.png")
    archive = shutil.make_archive(served / "cinic", "gztar", tmp_path / "images")
    url = f"{address}/cinic.tar.gz"
    with raises_user_error(f"^{url}: its checksum is wrong"):  # not Edinburgh's
        call(module, "--url", url)
    assert os.listdir(datadir / "CINIC") == []
    md5 = hashlib.md5(Path(archive).read_bytes()).hexdigest()
    monkeypatch.setattr(module, "MD5", md5)
    call(module, "--url", url)
    files = ["CINIC-10", "test.pt", "train.pt", "valid.pt"]
    assert sorted(os.listdir(datadir / "CINIC")) == files
    monkeypatch.setenv("DATADIR", str(datadir / "mine"))
    call(module, "--from", datadir / "CINIC/CINIC-10")
    assert sorted(os.listdir(datadir / "mine/CINIC")) == files[1:]
    assert [part.labels.tolist() for part in data.cinic()] == [[*range(10)]] * 3


@pytest.mark.parametrize("exercise", WITH_DATA)
def test_a_folder_without_the_data(exercise, datadir, tmp_path):
    with raises_user_error("does not have the data .*|no folder .*: see --help$"):
        call(DOWNLOADS[exercise], "--from", tmp_path)


def test_mnist_is_taken_from_a_folder(datadir, tmp_path):
    raw = tmp_path / "mine/MNIST/raw"
    raw.mkdir(parents=True)
    pixels = bytes(range(196)) * 8
    for split in ("train", "t10k"):  # each file begins with its shape
        shape = bytes([0, 0, 8, 3, 0, 0, 0, 2, 0, 0, 0, 28, 0, 0, 0, 28])
        (raw / f"{split}-images-idx3-ubyte").write_bytes(shape + pixels)
        labels = bytes([0, 0, 8, 1, 0, 0, 0, 2, 3, len(split)])
        (raw / f"{split}-labels-idx1-ubyte").write_bytes(labels)
    call(DOWNLOADS["mnist_multigpu"], "--from", tmp_path / "mine")
    train, test = SETS["mnist_multigpu"].mnist()
    assert train.labels.tolist() == [3, 5] and test.labels.tolist() == [3, 4]
    assert test.images.shape == (2, 1, 28, 28)
    assert bytes(test.images.numpy()) == pixels


def test_cifar_is_taken_from_a_folder(datadir, tmp_path, monkeypatch):
    folder = tmp_path / "cifar-100-python"
    folder.mkdir()
    data = np.arange(2 * 3072).reshape(2, 3072).astype(np.uint8)
    labels = {"fine_label_names": [str(i) for i in range(100)]}
    for name in ("train", "test"):
        split = {"data": data, "fine_labels": [0, 99]}
        (folder / name).write_bytes(pickle.dumps(split))
    (folder / "meta").write_bytes(pickle.dumps(labels))
    # These files are not Toronto's, of which torchvision knows the checksums.
    monkeypatch.setattr(cifar, "check_integrity", lambda *file: True)
    call(DOWNLOADS["cifar100_demo"], "--from", tmp_path)
    train, test = SETS["cifar100_demo"].cifar100()
    assert train.labels.tolist() == test.labels.tolist() == [0, 99]
    assert (train.images.numpy().reshape(2, 3072) == data).all()
