"""Backbones, their weights, and the script that made tinyvgg's."""

import sys

import pytest
import torch
from conftest import REPOSITORY, load, run

from common.cli import UserError

models = load("exercise8", "backbones")
load_features = models.load_features


@pytest.mark.parametrize("backbone, channels", [("vgg16", 512), ("tinyvgg", 64)])
def test_features_for_150_pixels(backbone, channels):
    features = load_features(backbone, "none")
    assert len(features) == 31
    with torch.no_grad():
        assert features(torch.rand(1, 3, 150, 150)).shape == (1, channels, 4, 4)
    last_block = [type(layer).__name__ for layer in features[24:]]
    assert last_block == ["Conv2d", "ReLU"] * 3 + ["MaxPool2d"]


def test_vgg16_is_torchvisions(tmp_path, monkeypatch):
    from torchvision.models import VGG16_Weights, vgg16

    assert VGG16_Weights.IMAGENET1K_V1.url == models.VGG16_URL
    assert str(load_features("vgg16", "none")) == str(vgg16(weights=None).features)
    state = {
        k: v
        for k, v in vgg16(weights=None).state_dict().items()
        if k.startswith("features")
    }
    file = tmp_path / "vgg16-397923af.pth"  # the name that torch.hub gives it
    torch.save(state | {"classifier.0.bias": torch.zeros(4096)}, file)
    assert models.WEIGHTS["vgg16"].name == file.name
    assert models.WEIGHTS["vgg16"].parent.name == "checkpoints"
    monkeypatch.setitem(models.WEIGHTS, "vgg16", file)
    loaded = load_features("vgg16").state_dict()
    assert all(torch.equal(state[f"features.{k}"], v) for k, v in loaded.items())
    torch.save({"features.0.bias": torch.zeros(64)}, file)
    with pytest.raises(UserError, match=r"damaged"):
        load_features("vgg16")


def test_tinyvgg_weights_are_small_and_loaded():
    assert models.WEIGHTS["tinyvgg"].stat().st_size < 1e6
    first, second = load_features("tinyvgg"), load_features("tinyvgg")
    random = load_features("tinyvgg", "none")
    for i in (0, 28):
        assert torch.equal(first[i].weight, second[i].weight)
        assert not torch.equal(first[i].weight, random[i].weight)


@pytest.mark.slow
def test_the_script_that_trains_tinyvgg(tmp_path):
    options = [
        "--images",
        48,
        "--epochs",
        1,
        "--batch-size",
        8,
        "--to",
        tmp_path / "new.pt",
    ]
    done = run(
        [sys.executable, "train_tinyvgg.py", *options], REPOSITORY / "exercise8"
    )
    assert done.returncode == 0, done.stderr
    new = torch.load(tmp_path / "new.pt")
    old = torch.load(models.WEIGHTS["tinyvgg"])
    assert {k: v.shape for k, v in new.items()} == {
        k: v.shape for k, v in old.items()
    }
