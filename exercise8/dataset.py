"""Dogs vs. cats: training, validation and test photos, and their augmentation."""

import torch
from torch.nn import functional as F

from common.data import InMemoryDataset, load_prepared

# Photos are DATADIR/NAME/RAW/SPLIT/CLASS/*; prepared, they have SIZE x SIZE pixels.
NAME, RAW, SIZE = "dogs-vs-cats", "train-2000", 150
SPLITS = "train", "validation", "test"
# Mean and deviation of ImageNet's images, scaled to 0..1, as VGG16's weights expect
# (https://pytorch.org/vision/stable/models.html).
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def dogs_vs_cats():
    """Return the training, validation and test sets: cats are 0.0, dogs are 1.0.

    Images are uint8 (N, 3, 150, 150). Raises UserError if they are missing.
    """
    sets = load_prepared(NAME, *SPLITS)
    return [InMemoryDataset(split.images, split.labels.float()) for split in sets]


def augment(images):
    """Return normalised images (N, 3, H, W), randomly scaled, sheared and mirrored.

    Scale (0.8 to 1.2) and shear (up to 0.2 of the height) are about the centre and
    differ for each image. Pixels from outside the image are 0, the mean colour.
    """
    n, device = len(images), images.device
    scale = torch.empty(n, device=device).uniform_(0.8, 1.2)
    shear = torch.empty(n, device=device).uniform_(-0.2, 0.2)
    mirror = torch.randint(0, 2, (n,), device=device) * 2 - 1
    zero = torch.zeros_like(scale)
    theta = [mirror / scale, shear / scale, zero, zero, 1 / scale, zero]
    theta = torch.stack(theta, dim=1).view(n, 2, 3)
    grid = F.affine_grid(theta, images.shape, align_corners=False)
    return F.grid_sample(images, grid, align_corners=False)
