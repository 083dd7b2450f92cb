"""Pretrained convolutional backbones for transfer learning: vgg16 and tinyvgg."""

from pathlib import Path

import torch
from torch import nn
from torchvision.models import VGG16_Weights, vgg

from common.errors import UserError, explain

# The layers of VGG16, configuration D of arXiv:1409.1556: output channels of its 13
# convolutions, and max-pooling ("M"). tinyvgg has an eighth of the channels, which
# takes 1/64 of the arithmetic.
VGG16 = vgg.cfgs["D"]
BACKBONES = {"vgg16": VGG16, "tinyvgg": [c if c == "M" else c // 8 for c in VGG16]}
WEIGHT_SETS = "pretrained", "none"
VGG16_URL = VGG16_Weights.IMAGENET1K_V1.url
WEIGHTS = {
    "vgg16": Path(torch.hub.get_dir(), "checkpoints", Path(VGG16_URL).name),
    "tinyvgg": Path(__file__).resolve().with_name("tinyvgg.pt"),
}


def load_features(backbone, weights="pretrained"):
    """Return the 31 convolutional layers of a backbone as an nn.Sequential.

    They map normalised images (N, 3, H, W) to (N, 512 or 64, H // 32, W // 32).
    weights: "pretrained" or, for random weights, "none". vgg16 was pretrained on
    ImageNet, tinyvgg on synthetic shapes (see ANSWERS.md). Nothing is downloaded,
    since compute nodes have no network. Raises UserError if the weights are missing.
    """
    features = vgg.make_layers(BACKBONES[backbone])
    if weights == "none":
        return features
    file = WEIGHTS[backbone]
    if not file.exists():
        raise UserError(
            f"no weights in {file}: run `python download_weights.py` on a login "
            "node, or add --backbone tinyvgg"
        )
    with explain(f"{file} has no weights of {backbone}", "download it again"):
        state = torch.load(file, map_location="cpu", weights_only=True)
        state = {k: v for k, v in state.items() if k.startswith("features.")}
        nn.ModuleDict({"features": features}).load_state_dict(state)
    return features
