"""Data: batches, data sets, prepared images, downloads, synthetic data."""

import hashlib
import io
import multiprocessing
import os
import pickle
import shutil
import signal
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
from conftest import WITH_DATA, call, load, raises_user_error
from PIL import Image
from torch.utils.data import Subset, TensorDataset, default_collate
from torchvision.models._api import Weights, WeightsEnum
from torchvision.transforms.v2 import functional as F

from common import prepare
from common.data import load_prepared, make_loader, normalise
from common.metrics import batch_sums, to_metrics

CPU = torch.device("cpu")
SETS = {exercise: load(exercise, "dataset") for exercise in WITH_DATA}
DOWNLOADS = {exercise: load(exercise, "download_data") for exercise in WITH_DATA}
PHOTOS, CINIC = DOWNLOADS["exercise8"], DOWNLOADS["cinic_lab"]
WEIGHTS = load("exercise8", "download_weights")
NOWHERE = "http://localhost:1/never"


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
def test_a_loader_takes_any_data_set_and_overrides_nothing(photos):
    cuda = torch.device("cuda")
    own = TensorDataset(torch.arange(10.0), torch.arange(10))
    assert [len(x) for x, _ in make_loader(own, 4, CPU)] == [4, 4, 2]
    options = {"collate_fn": len, "pin_memory": False, "persistent_workers": False}
    loader = make_loader(own, 4, cuda, num_workers=1, **options)
    assert not loader.pin_memory and not loader.persistent_workers
    assert list(loader) == [4, 4, 2]
    loader = make_loader(photos[0], 10, cuda, collate_fn=default_collate)
    assert loader.num_workers == 0 and loader.collate_fn is default_collate
    loader = make_loader(photos[0], 10, cuda, shuffle=True, num_workers=2)
    assert loader.persistent_workers and loader.pin_memory
    images, labels = (torch.cat(part) for part in zip(*loader, strict=True))
    assert labels.sum() == 20 and images.sum() == photos[0].images.sum()


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


# One image file


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


# All files of a set


SPLITS = "train", "test"


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


def prepare_and_load(source, target):
    prepare.prepare(source, target, SPLITS, 8)
    return load_prepared("set", *SPLITS)


def test_each_split_is_one_file_that_processes_share(source, target, tmp_path):
    (source / "train/a/000.png").rename(source / "train/a/000.PNG")
    (source / "train/a/Thumbs.db").write_bytes(b"not an image")
    (tmp_path / "others").write_text("others")
    (target / "train.pt.part").symlink_to(tmp_path / "others")  # is not followed
    sets = prepare_and_load(source, target)
    assert names(target) == ["test.pt", "train.pt"]
    assert (tmp_path / "others").read_text() == "others"
    assert not (target / "train.pt").is_symlink()
    for images, count, name in zip(sets, (30, 20), SPLITS, strict=True):
        assert images.images.shape == (count, 3, 8, 8)
        assert images.images.dtype == torch.uint8
        assert images.images[:, 0, 4, 4].tolist() == [*range(count)]
        assert (images.images[:, 1] == len(name)).all()
        assert images.labels.tolist() == [0] * (count // 2) + [1] * (count // 2)
        assert f"{target}/{name}.pt" in Path("/proc/self/maps").read_text()
        batch, labels = images.__getitems__([count - 1, 3])
        assert batch[:, 0, 4, 4].tolist() == [count - 1, 3]
        assert labels.tolist() == [1, 0] and images[3][0][0, 4, 4] == 3
    (target / "test.pt").unlink()
    with raises_user_error(
        "no .*/set/test.pt: run `python download_data.py`.*sampl"
    ):
        load_prepared("set", *SPLITS)


def test_what_cannot_be_read_is_named_and_nothing_is_saved(source, target):
    damaged = source / "train/a/007.png"
    damaged.write_bytes(damaged.read_bytes()[:40])
    with pytest.raises(Exception, match=r"007\.png|truncated|broken"):
        prepare_and_load(source, target)
    shutil.rmtree(source / "train/a")
    (source / "train/a").mkdir()
    with pytest.raises(FileNotFoundError, match="classes a"):
        prepare_and_load(source, target)
    assert names(target) == []


def test_all_sets_are_prepared_in_the_same_way(sample, monkeypatch):
    monkeypatch.setenv("DATADIR", str(sample))
    sets = {
        "exercise8": (SETS["exercise8"].dogs_vs_cats(), (40, 20, 120), 150, 2),
        "mnist_multigpu": (SETS["mnist_multigpu"].mnist(), (600, 100), 28, 10),
        "cifar100_demo": (SETS["cifar100_demo"].cifar100(), (500, 100), 32, 100),
        "cinic_lab": (SETS["cinic_lab"].cinic(), (100, 20, 20), 32, 10),
    }
    for exercise, (splits, counts, size, classes) in sets.items():
        folder = sample / SETS[exercise].NAME
        assert len(list(folder.glob("*.pt"))) == len(counts)
        for split, count, name in zip(
            splits, counts, SETS[exercise].SPLITS, strict=True
        ):
            saved = torch.load(folder / f"{name}.pt")
            channels = 1 if exercise == "mnist_multigpu" else 3
            assert saved["images"].dtype == torch.uint8
            assert saved["images"].shape == (count, channels, size, size)
            assert saved["labels"].dtype == torch.int64
            assert {*saved["labels"].tolist()} == {*range(classes)}
            assert len(split) == count
    images, labels = sets["cinic_lab"][0][0].__getitems__([0, 99])
    assert labels.tolist() == [0, 9]
    for i, name in ((0, "airplane/train-0.png"), (1, "truck/train-9.png")):
        pixels = np.asarray(Image.open(sample / "CINIC/CINIC-10/train" / name))
        assert (images[i].permute(1, 2, 0).numpy() == pixels).all()


def kill_at_save(function, count, half=b"half"):
    """Run a function in a new process, and kill it in this call of torch.save()."""
    calls, save = [], torch.save

    def counted(content, file):
        calls.append(file)
        if len(calls) == count:
            Path(file).write_bytes(half)
            os.kill(os.getpid(), signal.SIGKILL)
        save(content, file)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "save", counted)
        child = multiprocessing.get_context("fork").Process(target=function)
        child.start()
        child.join()
    assert child.exitcode == -signal.SIGKILL


def test_a_kill_while_saving_leaves_no_partial_file(source, target):
    again = partial(prepare_and_load, source, target)
    kill_at_save(again, 2)
    assert (target / "train.pt").exists() and not (target / "test.pt").exists()
    assert [len(part) for part in again()] == [30, 20]
    assert names(target) == ["test.pt", "train.pt"]


@pytest.mark.parametrize("exercise", WITH_DATA)
def test_synthetic_data_are_reproducible(exercise, sample, tmp_path, capsys):
    """They are the same each time, even after a kill."""
    module, name = load(exercise, "sample_data"), SETS[exercise].NAME
    again = partial(call, module, "--to", tmp_path, "--scale", 0.1)
    kill_at_save(again, 2)
    again()
    again()  # they are there
    assert capsys.readouterr().out.count(f"Making {tmp_path / name}") == 1
    for split in SETS[exercise].SPLITS:
        new, old = (torch.load(f / name / f"{split}.pt") for f in (tmp_path, sample))
        assert all(torch.equal(new[key], old[key]) for key in old)


# Downloads


@pytest.fixture
def server():
    """Return a server of .files; it says half the length of .short ones."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            if self.path not in server.files:
                return self.send_error(404)
            body = server.files[self.path]
            self.send_response(200)
            length = len(body) // (2 if self.path in server.short else 1)
            self.send_header("Content-Length", str(length))
            self.end_headers()
            self.wfile.write(body[:length])

        def log_message(self, *args):
            pass

    server = ThreadingHTTPServer(("localhost", 0), Handler)
    server.files, server.short = {}, set()
    server.url = f"http://localhost:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def test_vgg16_is_downloaded_and_checked(server, tmp_path, monkeypatch, capsys):
    buffer = io.BytesIO()
    torch.save({"features.0.bias": torch.zeros(64)}, buffer)
    name = f"vgg16-{hashlib.sha256(buffer.getvalue()).hexdigest()[:8]}.pth"

    class Served(WeightsEnum):
        IMAGENET1K_V1 = Weights(f"{server.url}/{name}", None, {})

    monkeypatch.setattr(WEIGHTS, "VGG16_Weights", Served)
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    with raises_user_error("404.*: try on a login node"):
        call(WEIGHTS)
    server.files[f"/{name}"] = b"<html>sorry</html>"
    with pytest.raises(RuntimeError, match="invalid hash"):
        call(WEIGHTS)
    assert names(tmp_path / "hub/checkpoints") == []
    server.files[f"/{name}"] = buffer.getvalue()
    call(WEIGHTS)
    assert names(tmp_path / "hub/checkpoints") == [name]
    assert "is ready" in capsys.readouterr().out


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


def test_dogs_vs_cats_is_downloaded_and_split(server, datadir, tmp_path):
    """Nobody publishes a checksum; what does not unpack whole is not kept."""
    page, url = "/photos.zip", ("--url", f"{server.url}/photos.zip")
    whole, folder = photo_archive(), datadir / "dogs-vs-cats"
    with raises_user_error("404.*try on a login node"):
        call(PHOTOS, *url)
    for other in (b"<html>sorry</html>", b"", photo_archive(20), whole):
        server.files[page] = other
        server.short = {page} if other is whole else set()
        with raises_user_error("photos.zip.*: try on a login node|; try on a login"):
            call(PHOTOS, *url)
        assert not {"train-2000", "train-2000.archive"} & {*names(folder)}
    server.short = set()
    call(PHOTOS, *url)
    kinds = product(SETS["exercise8"].SPLITS, ("cats", "dogs"))
    count = [len(names(folder / "train-2000" / s / kind)) for s, kind in kinds]
    assert count == [1000, 1000, 500, 500, 4, 2]
    assert (folder / "train-2000/train/cats/cat.1000.jpg").exists()  # not 666
    assert names(folder) == ["test.pt", "train-2000", "train.pt", "validation.pt"]
    sets = SETS["exercise8"].dogs_vs_cats()
    assert [len(split) for split in sets] == [2000, 1000, 6]
    call(PHOTOS, "--url", NOWHERE)  # it is there already


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


def test_cinic_is_downloaded_and_prepared(server, datadir, monkeypatch):
    body = server.files["/cinic.tar.gz"] = cinic_archive()
    url = "--url", f"{server.url}/cinic.tar.gz"
    with raises_user_error("checksum is wrong"):  # it is not Edinburgh's
        call(CINIC, *url)
    assert "CINIC-10" not in names(datadir / "CINIC")
    monkeypatch.setattr(CINIC, "MD5", hashlib.md5(body).hexdigest())
    call(CINIC, *url)
    files = ["CINIC-10", "test.pt", "train.pt", "valid.pt"]
    assert names(datadir / "CINIC") == files
    sets = SETS["cinic_lab"].cinic()
    assert [part.labels.tolist() for part in sets] == [[*range(10)]] * 3
    raw = datadir / "CINIC/CINIC-10"
    monkeypatch.setenv("DATADIR", str(datadir / "mine"))
    call(CINIC, "--from", raw)
    assert names(datadir / "mine/CINIC") == files[1:]
    mine = SETS["cinic_lab"].cinic()
    assert all(map(torch.equal, (s.images for s in sets), (s.images for s in mine)))


def idx(numbers):
    """Return a file as MNIST's are, of bytes."""
    head = bytes([0, 0, 8, numbers.ndim])
    return (
        head + b"".join(n.to_bytes(4, "big") for n in numbers.shape) + bytes(numbers)
    )


def test_mnist_is_taken_from_a_folder(datadir, tmp_path):
    raw, rng = tmp_path / "mine/MNIST/raw", np.random.default_rng(0)
    raw.mkdir(parents=True)
    for split, count in {"train": 5, "t10k": 3}.items():
        images = rng.integers(0, 256, (count, 28, 28), np.uint8)
        (raw / f"{split}-images-idx3-ubyte").write_bytes(idx(images))
        labels = np.arange(count, dtype=np.uint8)
        (raw / f"{split}-labels-idx1-ubyte").write_bytes(idx(labels))
    call(DOWNLOADS["mnist_multigpu"], "--from", tmp_path / "mine")
    assert names(datadir / "MNIST") == ["test.pt", "train.pt"]
    train, test = SETS["mnist_multigpu"].mnist()
    assert train.labels.tolist() == [0, 1, 2, 3, 4] and len(test) == 3
    assert (test.images.numpy()[:, 0] == images).all()


def test_cifar_is_taken_from_a_folder_if_it_is_whole(datadir, tmp_path, monkeypatch):
    from torchvision.datasets import CIFAR100

    folder = tmp_path / "cifar-100-python"
    folder.mkdir()
    data = np.arange(2 * 3072).reshape(2, 3072).astype(np.uint8)
    labels = {"fine_label_names": [str(i) for i in range(100)]}
    for name in ("train", "test"):
        split = {"data": data, "fine_labels": [0, 99]}
        (folder / name).write_bytes(pickle.dumps(split))
    (folder / "meta").write_bytes(pickle.dumps(labels))
    again = partial(call, DOWNLOADS["cifar100_demo"], "--from", tmp_path)
    with pytest.raises(RuntimeError, match="corrupted"):  # it is not Toronto's
        again()
    assert not datadir.exists()
    md5 = {f.name: hashlib.md5(f.read_bytes()).hexdigest() for f in folder.iterdir()}
    monkeypatch.setattr(CIFAR100, "train_list", [["train", md5["train"]]])
    monkeypatch.setattr(CIFAR100, "test_list", [["test", md5["test"]]])
    monkeypatch.setattr(CIFAR100, "meta", {**CIFAR100.meta, "md5": md5["meta"]})
    again()
    assert names(datadir / "CIFAR-100") == ["test.pt", "train.pt"]
    train, test = SETS["cifar100_demo"].cifar100()
    assert train.labels.tolist() == test.labels.tolist() == [0, 99]
    assert (train.images.numpy().reshape(2, 3072) == data).all()
