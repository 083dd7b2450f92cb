"""Pretrained convolutional backbones for transfer learning: vgg16 and tinyvgg."""

from pathlib import Path

import torch
from torch import nn

from common.errors import UserError

# Output channels of VGG16's 13 convolutions, and its max-pooling layers ("M"):
# configuration D of arXiv:1409.1556. tinyvgg has the same 31 layers with an eighth
# of the channels, which takes 1/64 of the arithmetic.
VGG16 = [64, 64, "M", 128, 128, "M", 256, 256, 256, "M"] + 2 * [512, 512, 512, "M"]
BACKBONES = {"vgg16": VGG16, "tinyvgg": [c if c == "M" else c // 8 for c in VGG16]}
WEIGHT_SETS = "imagenet", "none"
# The URL of torchvision.models.VGG16_Weights.IMAGENET1K_V1.
VGG16_URL = "https://download.pytorch.org/models/vgg16-397923af.pth"
WEIGHTS = {
    "vgg16": Path(torch.hub.get_dir(), "checkpoints", Path(VGG16_URL).name),
    "tinyvgg": Path(__file__).resolve().with_name("tinyvgg.pt"),
}


def load_features(backbone, weights="imagenet"):
    """Return the 31 convolutional layers of a backbone as an nn.Sequential.

    They map normalised images (N, 3, H, W) to (N, 512 or 64, H // 32, W // 32).
    weights: "imagenet" or, for random weights, "none". tinyvgg was trained on
    synthetic shapes instead of ImageNet (train_tinyvgg.py). Nothing is downloaded,
    since compute nodes have no network. Raises UserError if the weights are missing,
    damaged or unreadable.
    """
    # Built here, since importing torchvision takes as long as importing PyTorch.
    layers, in_channels = [], 3
    for channels in BACKBONES[backbone]:
        if channels == "M":
            layers.append(nn.MaxPool2d(2))
        else:
            layers += [nn.Conv2d(in_channels, channels, 3, padding=1), nn.ReLU(True)]
            in_channels = channels
    features = nn.Sequential(*layers)
    if weights == "none":
        return features
    file = WEIGHTS[backbone]
    try:
        state = torch.load(file, map_location="cpu", weights_only=True)
        state = {k: v for k, v in state.items() if k.startswith("features.")}
        nn.ModuleDict({"features": features}).load_state_dict(state)
    except FileNotFoundError:
        raise UserError(
            f"no weights in {file}; run `python download_weights.py` on a login "
            "node, or add --backbone tinyvgg"
        ) from None
    except OSError as error:
        raise UserError(f"cannot read {file}: {error.strerror}") from None
    except Exception as error:
        raise UserError(
            f"{file} is damaged ({type(error).__name__}); delete it and "
            "download it again"
        ) from None
    return features
