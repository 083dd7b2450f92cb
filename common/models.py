"""Backbones for transfer learning: convolutions with pretrained weights."""

from pathlib import Path

import torch
from torch import nn
from torchvision.models import VGG16_Weights, vgg

from common.cli import UserError

# Channels of VGG16's 13 convolutions (configuration D of arXiv:1409.1556), and an
# eighth of them: the same 31 layers, 1/64 of the arithmetic.
VGG16_URL = VGG16_Weights.IMAGENET1K_V1.url
CHANNELS = {"vgg16": vgg.cfgs["D"]}
CHANNELS["tinyvgg"] = [c if c == "M" else c // 8 for c in vgg.cfgs["D"]]
WEIGHTS = {
    "vgg16": Path(torch.hub.get_dir(), "checkpoints", Path(VGG16_URL).name),
    "tinyvgg": Path(__file__).with_name("tinyvgg.pt"),
}


def load_features(backbone, weights="imagenet"):
    """Return the 31 layers of "vgg16" or "tinyvgg" below its top, an nn.Sequential.

    They map normalised images (N, 3, H, W) to (N, 512 or 64, H // 32, W // 32).
    weights "none" leaves them random; those of tinyvgg come from drawn shapes, not
    from ImageNet (tinyvgg/train_tinyvgg.py). Nothing is downloaded, as compute nodes
    have no network: raises UserError if the weights are missing or damaged.
    """
    features = vgg.make_layers(CHANNELS[backbone])
    if weights == "none":
        return features
    file = WEIGHTS[backbone]
    if backbone == "vgg16" and not file.exists():
        raise UserError(
            f"no weights in {file}: type `python -m common.download vgg16` where "
            "there is a network, or add --backbone tinyvgg"
        )
    try:
        state = torch.load(file, map_location="cpu", weights_only=True)
        state = {k: v for k, v in state.items() if k.startswith("features.")}
        nn.ModuleDict({"features": features}).load_state_dict(state)
    except Exception as error:
        raise UserError(
            f"{file} is damaged ({type(error).__name__}): delete it"
        ) from None
    return features
