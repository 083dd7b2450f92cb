"""Exercise 8: trained layers, backbones, weights."""

import pytest
import torch
from conftest import load, raises_user_error
from record_training import record
from run_ranks import Run

backbones = load("exercise8", "backbones")
load_features = backbones.load_features


@pytest.mark.parametrize("finetuning, trained", [(0, 4), (1, 4 + 6)])
def test_the_head_is_trained_then_the_last_block_too(
    finetuning, trained, sample, tmp_path
):
    """Each layer has a weight and a bias; only the last ones change."""
    options = "--backbone=tinyvgg", "--epochs=1", f"--finetune-epochs={finetuning}"
    script = "exercise8/pytorch_dvc_cnn_pretrained.py"
    (seen,) = Run(tmp_path, sample, script, *options, patch=record).results()
    pairs = zip(seen["start"], seen["weights"], strict=True)
    changed = [not torch.equal(one, other) for one, other in pairs]
    assert changed == [False] * (30 - trained) + [True] * trained


def test_vgg16_has_the_weights_of_a_file(tmp_path, monkeypatch):
    file = tmp_path / "vgg16.pth"
    monkeypatch.setitem(backbones.WEIGHTS, "vgg16", file)
    with raises_user_error("no weights in .*download_weights.py.*tinyvgg"):
        load_features("vgg16")
    features = load_features("vgg16", "none")
    state = {f"features.{name}": v for name, v in features.state_dict().items()}
    torch.save(state | {"classifier.0.bias": torch.zeros(4096)}, file)
    loaded = load_features("vgg16").state_dict()
    assert all(torch.equal(state[f"features.{k}"], v) for k, v in loaded.items())
    torch.save({"features.0.weight": torch.zeros(1)}, file)
    with raises_user_error(f"^{file} has no weights of vgg16 .*: download"):
        load_features("vgg16")


def test_tinyvgg_has_its_weights():
    first, second = load_features("tinyvgg"), load_features("tinyvgg")
    for i in (0, 28):  # the first layer and the last: not random ones
        assert torch.equal(first[i].weight, second[i].weight)
    with torch.no_grad():
        assert first(torch.rand(1, 3, 150, 150)).shape == (1, 64, 4, 4)
