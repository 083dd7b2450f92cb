"""Downloads VGG16's ImageNet weights: `python download_weights.py`, 530 MB.

Run it on a login node: compute nodes usually have no network. The weights go to
torch.hub's folder: ~/.cache/torch, or TORCH_HOME if that is set.
"""

from torchvision.models import VGG16_Weights

from backbones import VGG16_URL, WEIGHTS
from common.errors import explain, run


def main():
    with explain(f"cannot download {VGG16_URL}", "try again, on a login node"):
        VGG16_Weights.IMAGENET1K_V1.get_state_dict(check_hash=True)
    print(f"{WEIGHTS['vgg16']} is ready")


if __name__ == "__main__":
    run(main)
