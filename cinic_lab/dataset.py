"""The CINIC-10 data set: its splits, constants and augmentation."""

import torch
from torch.nn import functional as F

from common.data import load_prepared

# Images are DATADIR/NAME/RAW/SPLIT/CLASS/*, SIZE x SIZE pixels.
NAME, RAW, SIZE = "CINIC", "CINIC-10", 32
SPLITS = "train", "valid", "test"
CLASSES = (
    *("airplane", "automobile", "bird", "cat", "deer"),
    *("dog", "frog", "horse", "ship", "truck"),
)
# Published by its authors (https://github.com/BayesWatch/cinic-10), for values 0..1.
MEAN = 0.47889522, 0.47227842, 0.43047404
STD = 0.24205776, 0.23828046, 0.25874835


def cinic():
    """Return the training, validation and test set: images with labels 0 to 9.

    Images are uint8 (N, 3, 32, 32). Raises UserError if they are missing.
    """
    return load_prepared(NAME, *SPLITS)


def crop_and_flip(images, padding=4):
    """Return images (N, C, H, W), each randomly cropped and mirrored, padded by 0.

    Torchvision's RandomCrop(H, padding) and RandomHorizontalFlip() do this for one
    image at a time; here the whole batch takes one gather.
    """
    n, channels, height, width = images.shape
    device = images.device
    y, x = torch.randint(2 * padding + 1, (2, n, 1), device=device)
    mirror = torch.randint(2, (n, 1), device=device, dtype=torch.bool)
    rows, columns = (torch.arange(side, device=device) for side in (height, width))
    rows = y + rows  # source rows in the padded images: (N, H)
    columns = x + torch.where(mirror, columns.flip(0), columns)  # (N, W)
    source = rows[:, :, None] * (width + 2 * padding) + columns[:, None]
    source = source.view(n, 1, -1).expand(-1, channels, -1)
    padded = F.pad(images, [padding] * 4).flatten(2)
    return padded.gather(2, source).view(images.shape)
