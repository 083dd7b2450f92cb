"""Synthetic images of four shapes, the same in every process."""

import torch

from common.data import InMemoryDataset

SHAPES = "disc", "square", "ring", "cross"
MEAN, STD = (0.5, 0.5, 0.5), (0.25, 0.25, 0.25)


def shapes(count, size=32, seed=0):
    """Return an InMemoryDataset of uint8 (count, 3, size, size), labels 0 to 3.

    Position, radius, colour and background of each shape are random. With the same
    seed, all processes get the same images.
    """
    rng = torch.Generator().manual_seed(seed)

    def uniform(low, high, *shape):
        numbers = torch.rand(count, *shape, generator=rng)
        return numbers.mul_(high - low).add_(low)

    labels = torch.randint(len(SHAPES), (count,), generator=rng)
    radius = uniform(0.15, 0.3, 1, 1) * size
    grid = torch.arange(size).float()
    dx = (grid - uniform(0.3, 0.7, 1, 1) * size).abs()  # (count, 1, size)
    dy = (grid.view(-1, 1) - uniform(0.3, 0.7, 1, 1) * size).abs()
    near, far = torch.minimum(dx, dy), torch.maximum(dx, dy)
    disc = dx.square() + dy.square() < radius.square()
    square = far < 0.85 * radius
    ring = disc & (dx.square() + dy.square() > (0.6 * radius).square())
    cross = (far < radius) & (near < 0.35 * radius)
    masks = torch.stack([disc, square, ring, cross])  # (4, count, size, size)
    mask = masks[labels, torch.arange(count)].unsqueeze(1)
    colour, background = uniform(120, 255, 3, 1, 1), uniform(0, 140, 3, 1, 1)
    images = torch.where(mask, colour, background) + uniform(-60, 60, 1, size, size)
    return InMemoryDataset(images.clamp_(0, 255).byte(), labels)


def flip(images):
    """Flip each of the images (N, C, H, W) with probability 0.5, on their device."""
    flipped = torch.rand(len(images), 1, 1, 1, device=images.device) < 0.5
    return torch.where(flipped, images.flip(3), images)
