"""Data sets, loaders, and what happens to a batch on its way to the model."""

import os
import pickle
import shutil
import struct
import warnings
from collections import Counter
from functools import partial

import numpy as np
import pytest
import torch
from conftest import as_nobody, call, draw, load, mistake
from torch.utils.data import Subset

from common.data import make_loader, normalise
from common.metrics import batch_sums, means

CPU = torch.device("cpu")


EXERCISE8 = load("exercise8", "dataset")
CINIC = load("cinic_lab", "dataset")


@pytest.fixture
def photos(sample, monkeypatch):
    monkeypatch.setenv("DATADIR", str(sample))
    return EXERCISE8.dogs_vs_cats()


def test_a_loader_gives_each_image_once(photos):
    loader = make_loader(photos[0], 12, CPU, shuffle=True)
    first, second = ([images for images, _ in loader] for _ in range(2))
    assert [len(images) for images in first] == [12] * 3 + [4]
    total = torch.cat(first).sum()
    assert total == torch.cat(second).sum() and total > 0
    assert not torch.equal(first[0], second[0])


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


def test_the_hint_on_drop_last_works(photos):
    loader = make_loader(photos[0], 12, CPU, drop_last=True)  # of 40
    assert [len(images) for images, _ in loader] == [12] * 3


def test_an_empty_share_is_no_error(photos):
    assert list(make_loader(Subset(photos[1], []), 10, CPU)) == []


def test_normalise_is_torchvisions():
    from torchvision.transforms.v2 import functional as F

    images = torch.randint(0, 256, (4, 3, 15, 15), dtype=torch.uint8)
    mean, std = EXERCISE8.MEAN, EXERCISE8.STD
    expected = F.normalize(F.to_dtype(images, scale=True), mean, std)
    torch.testing.assert_close(normalise(images, mean, std), expected)


def test_augmentation_is_drawn_for_each_image_within_bounds():
    torch.manual_seed(0)
    y, x = torch.meshgrid(*[torch.linspace(-1, 1, 101)] * 2, indexing="ij")
    images = torch.stack([x, y, torch.ones_like(x)]).repeat(200, 1, 1, 1)
    new = EXERCISE8.augment(images)
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


def test_sample_data_is_always_the_same(sample, tmp_path):
    again = draw(tmp_path, 0.05)
    drawn = sorted([*again.rglob("*.jpg"), *again.rglob("*.png")])
    assert len(drawn) == 90 + 70
    for file in drawn:
        assert file.read_bytes() == (sample / file.relative_to(again)).read_bytes()


def test_crop_and_flip_gives_what_torchvision_can_give():
    """Each of 3 x 3 crops, mirrored or not, comes up, and nothing else does."""
    from torchvision.transforms.v2 import functional as F

    torch.manual_seed(0)
    image = torch.arange(1, 61, dtype=torch.uint8).view(3, 4, 5)
    padded, possible = F.pad(image, [1, 1, 1, 1]), set()
    for y in range(3):
        for x in range(3):
            crop = F.crop(padded, y, x, 4, 5)
            possible |= {str(crop.tolist()), str(F.hflip(crop).tolist())}
    new = CINIC.crop_and_flip(image.expand(1000, -1, -1, -1), padding=1)
    assert new.dtype == torch.uint8 and new.shape == (1000, 3, 4, 5)
    counts = Counter(str(one.tolist()) for one in new)
    assert set(counts) == possible and len(possible) == 18
    assert min(counts.values()) > 25  # 56 on average
    assert (CINIC.crop_and_flip(torch.ones(99, 1, 32, 32)) == 0).any()  # by default


def test_top1_and_top5():
    top1_top5 = load("cinic_lab", "topk").top1_top5
    scores = torch.tensor([[9.0, 8, 7, 6, 5, 4]] * 4)
    first, five = top1_top5(scores, torch.tensor([0, 1, 4, 5]))
    assert first.tolist() == [True, False, False, False]
    assert five.tolist() == [True, True, True, False]
    sums = batch_sums(torch.tensor(2.0), first, five)
    expected = {"loss": 2.0, "acc1": 25.0, "acc5": 75.0}
    assert means(sums, "acc1", "acc5") == expected


def idx(*shape, values=0):
    """Return a file as MNIST's are, of bytes that have all the same value."""
    head = struct.pack(f">4B{len(shape)}I", 0, 0, 8, len(shape), *shape)
    return head + bytes([values]) * int(np.prod(shape))


@pytest.mark.parametrize(
    "file, body, words",
    [
        ("train-labels-idx1-ubyte", idx(599), "599 labels"),
        ("t10k-images-idx3-ubyte", idx(99, 28, 28), "100 labels"),
        ("t10k-images-idx3-ubyte", idx(100, 28, 27), "100 labels"),
        ("t10k-labels-idx1-ubyte", idx(100, values=10), "a label is 10"),
        ("train-labels-idx1-ubyte", idx(600, values=255), "a label is 255"),
    ],
)
def test_mnist_that_does_not_fit(file, body, words, sample, tmp_path, monkeypatch):
    monkeypatch.setenv("DATADIR", str(tmp_path))
    shutil.copytree(sample / "MNIST", tmp_path / "MNIST")
    assert len(load("mnist_multigpu", "dataset").mnist()[0]) == 600
    (tmp_path / "MNIST/raw" / file).write_bytes(body)
    with mistake(words):
        load("mnist_multigpu", "dataset").mnist()


def test_an_empty_mnist(sample, tmp_path, monkeypatch):
    monkeypatch.setenv("DATADIR", str(tmp_path))
    raw = shutil.copytree(sample / "MNIST", tmp_path / "MNIST") / "raw"
    (raw / "train-labels-idx1-ubyte").write_bytes(idx(0))
    (raw / "train-images-idx3-ubyte").write_bytes(idx(0, 28, 28))
    with mistake("is damaged"):
        load("mnist_multigpu", "dataset").mnist()


@pytest.fixture
def cifar(sample, tmp_path, monkeypatch):
    """Write CIFAR-100's training file, and read it; the other one is drawn."""
    monkeypatch.setenv("DATADIR", str(tmp_path))
    folder = tmp_path / "cifar-100-python"
    shutil.copytree(sample / folder.name, folder)

    def read(content):
        (folder / "train").write_bytes(content)
        return load("cifar100_demo", "dataset").cifar100()[0]

    return read


def pickled(labels=(0, 99), images=2, kind=np.uint8, protocol=2):
    data = np.arange(images * 3072).reshape(images, 3072).astype(kind)
    split = {"data": data, "fine_labels": list(labels), "filenames": ["a", "b"]}
    return pickle.dumps(split, protocol)


@pytest.mark.parametrize("protocol", range(6))
def test_cifar_of_any_pickle(protocol, cifar):
    train = cifar(pickled(protocol=protocol))
    assert train.labels.tolist() == [0, 99]
    assert train.images.flatten()[:3].tolist() == [0, 1, 2]


def test_cifar_as_it_was_pickled_by_python_2_and_numpy_1(cifar):
    content = pickled().replace(b"numpy._core.multiarray", b"numpy.core.multiarray")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(cifar(content)) == 2


@pytest.mark.parametrize(
    "content, words",
    [
        (pickled(labels=(1,)), "1 labels, 2 images"),
        (pickled(labels=(1, 100)), "not in 0..99"),
        (pickled(labels=(-1, 2)), "not in 0..99"),
        (pickled(kind=np.int64), "damaged"),
        (pickled(labels=(), images=0), "damaged"),
    ],
)
def test_cifar_that_does_not_fit(content, words, cifar):
    with mistake(words):
        cifar(content)


class Evil:
    def __init__(self, *call):
        self.call = call

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize("protocol", [0, 2, 5])
def test_a_pickle_runs_no_code(protocol, cifar, tmp_path):
    ran = tmp_path / "ran"
    for what in (
        (os.mkdir, (str(ran),)),
        (eval, (f"__import__('os').mkdir({str(ran)!r})",)),
        (np.save, (str(ran), 1)),
        (np.fromfile, ("/etc/passwd",)),
    ):
        with mistake("it would call"):
            cifar(pickle.dumps({"data": Evil(*what)}, protocol))
    assert not list(tmp_path.glob("ran*"))


def test_nor_does_one_that_download_data_is_to_take(tmp_path, monkeypatch):
    monkeypatch.setenv("DATADIR", str(tmp_path / "data"))
    (tmp_path / "from").mkdir()
    evil = pickle.dumps(Evil(os.mkdir, (str(tmp_path / "ran"),)))
    for name in ("meta", "train", "test"):
        (tmp_path / "from" / name).write_bytes(evil)
    with mistake("no whole cifar-100-python in .*corrupted"):
        call(load("cifar100_demo", "download_data"), "--from", tmp_path / "from")
    assert not (tmp_path / "ran").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize("what", ["file", "folder"])
@pytest.mark.parametrize("name", ["MNIST", "cifar-100-python", "CINIC", "vgg16"])
def test_what_may_not_be_read_is_not_called_damaged(
    name, what, sample, public, monkeypatch
):
    monkeypatch.setenv("DATADIR", str(public))
    if name == "vgg16":
        module = load("exercise8", "backbones")
        file = public / "vgg16/weights.pth"
        file.parent.mkdir()
        file.write_bytes(b"good")
        monkeypatch.setitem(module.WEIGHTS, name, file)
        read = partial(module.load_features, "vgg16")
    else:
        files = {"MNIST": "raw/train-images-idx3-ubyte", "CINIC": "train-32.pt"}
        file = public / name / files.get(name, "train")
        shutil.copytree(sample / name, public / name)
        read = {
            "MNIST": load("mnist_multigpu", "dataset").mnist,
            "CINIC": load("cinic_lab", "dataset").cinic,
        }.get(name, load("cifar100_demo", "dataset").cifar100)
    closed = file if what == "file" else file.parent
    closed.chmod(0)

    def as_student():
        with mistake(r"^cannot read [^;]*: Permission denied$"):
            read()

    as_nobody(as_student)
    if what == "folder":  # its names may be read, and no more
        closed.chmod(0o444)
        as_nobody(as_student)
    closed.chmod(0o755)
