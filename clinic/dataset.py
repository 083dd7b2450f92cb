"""Synthetic images of four shapes, the same in every process."""

import torch
from torch.utils.data import TensorDataset


def shapes(count, size=32, seed=0):
    """Return images, float (count, 3, size, size) from -1 to 1, and labels 0 to 3.

    The shapes are discs, squares, rings and crosses; position, radius, colour and
    background are random. With the same seed, all processes get the same images.
    """
    rng = torch.Generator().manual_seed(seed)

    def uniform(low, high, *shape):
        numbers = torch.rand(count, *shape, generator=rng)
        return numbers.mul_(high - low).add_(low)

    labels = torch.randint(4, (count,), generator=rng)
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
    return TensorDataset(images.clamp_(0, 255).div_(127.5).sub_(1), labels)
