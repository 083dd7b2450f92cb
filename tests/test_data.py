"""Data sets, loaders, and what happens to a batch on its way to the model."""

from collections import Counter

import pytest
import torch
from conftest import draw, load
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
    loader = make_loader(photos[0], 10, CPU, shuffle=True)
    first, second = ([images for images, _ in loader] for _ in range(2))
    assert [len(images) for images in first] == [10] * 6 + [4]
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
    assert labels.sum() == 32
    assert images.sum() == photos[0].images.sum()


def test_the_hint_on_drop_last_works(photos):
    loader = make_loader(photos[0], 10, CPU, drop_last=True)  # of 64
    assert [len(images) for images, _ in loader] == [10] * 6


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
    assert len(drawn) == 62 + 70
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
