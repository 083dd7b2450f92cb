"""Data: batches, augmentation, prepared images, synthetic data."""

import io
import os
import resource
from collections import Counter
from pathlib import Path

import pytest
import torch
from conftest import WITH_DATA, call, load, raises_user_error
from PIL import Image
from torch.utils.data import TensorDataset
from torchvision.transforms.v2 import functional as F

from common import prepare
from common.data import load_prepared, make_loader, normalise
from common.metrics import batch_sums, to_metrics

CPU = torch.device("cpu")
SETS = {exercise: load(exercise, "dataset") for exercise in WITH_DATA}


def test_a_loader_yields_every_image_once_in_a_new_order(sample, monkeypatch):
    monkeypatch.setenv("DATADIR", str(sample))
    train, *_ = SETS["exercise8"].dogs_vs_cats()
    loader = make_loader(train, 12, CPU, shuffle=True)
    first, second = ([images for images, _ in loader] for _ in range(2))
    assert [len(images) for images in first] == [12, 12, 12, 4]
    assert torch.cat(first).sum() == torch.cat(second).sum() == train.images.sum()
    assert not torch.equal(first[0], second[0])


def test_a_loader_takes_any_data_set_and_overrides_nothing():
    cuda = torch.device("cuda")
    own = TensorDataset(torch.arange(10.0), torch.arange(10))
    assert [len(x) for x, _ in make_loader(own, 4, CPU)] == [4, 4, 2]
    loader = make_loader(own, 4, cuda, num_workers=1)
    assert loader.pin_memory and loader.persistent_workers
    options = {"collate_fn": len, "pin_memory": False, "persistent_workers": False}
    loader = make_loader(own, 4, cuda, num_workers=1, **options)
    assert not loader.pin_memory and not loader.persistent_workers
    assert list(loader) == [4, 4, 2]


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


def test_augmentation_is_random_for_every_image_and_within_bounds():
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


def test_a_photo_is_resized_as_by_torchvision(sample):
    for file in (sample / "dogs-vs-cats/train-2000/train/dogs").iterdir():
        whole = F.pil_to_tensor(Image.open(file))
        expected = F.resize(whole, [150, 150], antialias=True)
        difference = prepare.read_photo(file, 150).int() - expected
        assert difference.abs().max() <= 1


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
def target(tmp_path, monkeypatch):
    monkeypatch.setenv("DATADIR", str(tmp_path / "data"))
    return tmp_path / "data/set"


def prepare_and_load(source, target):
    prepare.prepare(source, target, SPLITS, 8)
    return load_prepared("set", *SPLITS)


def test_every_split_is_one_file_that_processes_share(source, target):
    (source / "train/a/Thumbs.db").write_bytes(b"not an image")
    sets = prepare_and_load(source, target)
    assert sorted(os.listdir(target)) == ["test.pt", "train.pt"]
    for images, count, name in zip(sets, (30, 20), SPLITS, strict=True):
        assert images.images.shape == (count, 3, 8, 8)
        assert images.images[:, 0, 4, 4].tolist() == [*range(count)]
        assert (images.images[:, 1] == len(name)).all()
        assert images.labels.tolist() == [0] * (count // 2) + [1] * (count // 2)
        assert f"{target}/{name}.pt" in Path("/proc/self/maps").read_text()
        batch, labels = images.__getitems__([count - 1, 3])
        assert batch[:, 0, 4, 4].tolist() == [count - 1, 3]
        assert labels.tolist() == [1, 0]
        image, label = images[count - 1]
        assert image[0, 4, 4] == count - 1 and label == 1
    (target / "test.pt").unlink()
    with raises_user_error("no .*/test.pt: run `python download_data.py`.*sampl"):
        load_prepared("set", *SPLITS)


def test_other_files_than_prepared_data_are_refused(target):
    images, labels = torch.zeros(4, 3, 8, 8, dtype=torch.uint8), torch.arange(4)
    file = target / "train.pt"
    prepare.save_split(target, "train", images, labels)
    whole = file.read_bytes()
    floats, image = io.BytesIO(), io.BytesIO()
    torch.save({"images": images.float(), "labels": labels}, floats)
    torch.save({"images": images[0], "labels": labels}, image)
    for other in (whole[:-500], floats.getvalue(), image.getvalue()):
        file.write_bytes(other)
        with raises_user_error(f"^{file} is not prepared data: run download"):
            load_prepared("set", "train")


def test_a_full_disk_is_an_oserror_and_no_split_is_saved(target):
    """Here the limit on a file's size ends the writing."""
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, old[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            prepare.save_split(target, "train", torch.zeros(999), torch.zeros(999))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
    assert not (target / "train.pt").exists()


def test_a_damaged_image_is_an_error_and_nothing_is_saved(source, target):
    damaged = source / "train/a/007.png"
    damaged.write_bytes(damaged.read_bytes()[:40])
    with pytest.raises(Exception, match=r"007\.png|truncated|broken"):
        prepare_and_load(source, target)
    assert not target.exists()


@pytest.mark.parametrize("exercise", WITH_DATA)
def test_synthetic_data_are_the_same_every_time(exercise, sample, tmp_path, capsys):
    """A run that was ended early is made up for; a whole one is left alone."""
    module, data = load(exercise, "sample_data"), SETS[exercise]
    folder, options = tmp_path / data.NAME, ("--to", tmp_path, "--scale", 0.1)
    call(module, *options)
    (folder / f"{data.SPLITS[-1]}.pt").unlink()
    call(module, *options)
    call(module, *options)
    printed = capsys.readouterr().out
    assert printed.count(f"Making {folder}") == 2
    assert "delete it for another --scale" in printed
    for file in (f"{split}.pt" for split in data.SPLITS):
        new, old = torch.load(folder / file), torch.load(sample / data.NAME / file)
        assert all(torch.equal(new[key], old[key]) for key in old)
