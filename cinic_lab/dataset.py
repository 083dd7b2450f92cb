"""CINIC-10: images to train, to validate and to test on, and how they vary."""

import torch
from torch.nn import functional as F

from common.data import load_prepared

# Image files are DATADIR/NAME/RAW/SPLIT/CLASS/*, of SIZE x SIZE pixels.
NAME, RAW, SIZE = "CINIC", "CINIC-10", 32
SPLITS = "train", "valid", "test"
CLASSES = (
    *("airplane", "automobile", "bird", "cat", "deer"),
    *("dog", "frog", "horse", "ship", "truck"),
)
# As its authors give them (https://github.com/BayesWatch/cinic-10), scaled to 0..1.
MEAN = 0.47889522, 0.47227842, 0.43047404
STD = 0.24205776, 0.23828046, 0.25874835


def cinic():
    """Return the images to train, validate and test on, and labels 0 to 9.

    Images are uint8 (N, 3, 32, 32). Raises UserError if they are not there.
    """
    return load_prepared(NAME, SPLITS, SIZE, len(CLASSES))


def crop_and_flip(images, padding=4):
    """Return images (N, C, H, W), shifted by up to padding pixels, some mirrored.

    Both are drawn for each image; what comes in from outside is 0. Torchvision's
    RandomCrop(H, padding) and RandomHorizontalFlip() do so with one image at a time.
    """
    n, channels, height, width = images.shape
    device = images.device
    y, x = torch.randint(2 * padding + 1, (2, n, 1), device=device)
    mirror = torch.randint(2, (n, 1), device=device, dtype=torch.bool)
    rows, columns = (torch.arange(side, device=device) for side in (height, width))
    rows = y + rows  # of the padded image, that pixels come from: (N, H)
    columns = x + torch.where(mirror, columns.flip(0), columns)  # (N, W)
    source = rows[:, :, None] * (width + 2 * padding) + columns[:, None]
    source = source.view(n, 1, -1).expand(-1, channels, -1)
    padded = F.pad(images, [padding] * 4).flatten(2)
    return padded.gather(2, source).view(images.shape)
