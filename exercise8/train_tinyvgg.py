"""Trains tinyvgg's weights, tinyvgg.pt, on synthetic shapes and textures.

    python train_tinyvgg.py        # half an hour on two cores

Each image shows one of 10 shapes with one of 10 textures, on a background with one
of 10 textures. The model learns to name all three. No shape is a cat or a dog.
"""

import argparse
import math
import os
from concurrent.futures import ProcessPoolExecutor

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch import nn
from torchvision.models import vgg
from torchvision.transforms.functional import pil_to_tensor
from tqdm import tqdm

from backbones import BACKBONES, WEIGHTS
from common.data import normalise
from common.errors import positive, run
from dataset import MEAN, STD

SIZE = 96
TEXTURES = (
    *("plain", "stripes", "checks", "dots", "waves"),
    *("clouds", "grain", "gradient", "bricks", "rings"),
)
SHAPES = (
    *("disc", "triangle", "square", "pentagon", "star"),
    *("cross", "ring", "crescent", "heart", "arrow"),
)


def draw_texture(rng, pattern, width, height):
    """Return an RGB image of a texture with random colours, scale and direction."""
    first, second = rng.uniform(0, 255, (2, 3))
    angle = rng.uniform(0, math.pi)
    period = rng.uniform(0.06, 0.2) * min(width, height)
    y, x = np.mgrid[:height, :width]
    u = (x * math.cos(angle) + y * math.sin(angle)) / period
    v = (y * math.cos(angle) - x * math.sin(angle)) / period
    if pattern == "clouds":
        small = Image.fromarray(rng.integers(0, 255, (9, 9), dtype=np.uint8))
        mix = np.asarray(small.resize((width, height), Image.BICUBIC)) / 255
    else:
        mix = {
            "plain": lambda: 0 * u,
            "stripes": lambda: np.floor(u) % 2,
            "checks": lambda: (np.floor(u) + np.floor(v)) % 2,
            "dots": lambda: np.hypot(u % 1 - 0.5, v % 1 - 0.5) < 0.3,
            "waves": lambda: np.sin(2 * u + 2 * np.sin(v)) / 2 + 0.5,
            "grain": lambda: rng.random((height, width)),
            "gradient": lambda: (u - u.min()) / np.ptp(u),
            "bricks": lambda: (v % 1 < 0.2) | ((u / 2 + np.floor(v) / 2) % 1 < 0.1),
            "rings": lambda: np.sin(2 * np.hypot(u - u.mean(), v - v.mean())) > 0,
        }[pattern]()
    pixels = first + (second - first) * mix[..., None]
    pixels = pixels + rng.normal(0, 4, pixels.shape)
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8))


def circle(x, y, radius):
    """Return points of a circle around (x, y)."""
    angles = np.linspace(0, 2 * math.pi, 32)
    return np.stack([x + radius * np.cos(angles), y + radius * np.sin(angles)], 1)


def regular_polygon(corners, inner=None):
    """Return a regular polygon of radius 1 or, with an inner radius, a star."""
    n = corners * (2 if inner else 1)
    angles = np.arange(n) * 2 * math.pi / n - math.pi / 2
    radius = np.where(np.arange(n) % 2, inner or 1, 1)
    return np.stack([radius * np.cos(angles), radius * np.sin(angles)], 1)


def outlines(shape):
    """Return a shape of radius 1: polygons to fill, polygons to cut out."""
    t = np.linspace(0, 2 * math.pi, 40)
    heart_y = -0.8 * np.cos(t) + 0.3 * np.cos(2 * t) + 0.1 * np.cos(3 * t)
    heart = np.stack([np.sin(t) ** 3, heart_y], 1)
    bar = np.array([[-1, -0.3], [1, -0.3], [1, 0.3], [-1, 0.3]])
    return {
        "disc": ([circle(0, 0, 0.9)], []),
        "triangle": ([regular_polygon(3)], []),
        "square": ([regular_polygon(4)], []),
        "pentagon": ([regular_polygon(5)], []),
        "star": ([regular_polygon(5, 0.4)], []),
        "cross": ([bar, bar[:, ::-1]], []),
        "ring": ([circle(0, 0, 0.9)], [circle(0, 0, 0.5)]),
        "crescent": ([circle(0, 0, 0.9)], [circle(0.4, 0, 0.7)]),
        "heart": ([heart], []),
        "arrow": ([bar * 0.8, np.array([[1, 0], [0.1, -0.8], [0.1, 0.8]])], []),
    }[shape]


def draw_shape(rng, shape, size, fill, background):
    """Return an RGB image, size x size, of a textured shape on a texture."""
    turn, radius = rng.uniform(-math.pi, math.pi), rng.uniform(0.2, 0.42) * size
    centre, squeeze = rng.uniform(0.4, 0.6, 2) * size, [1, rng.uniform(0.75, 1)]
    rotation = radius * np.array(
        [[math.cos(turn), math.sin(turn)], [-math.sin(turn), math.cos(turn)]]
    )
    mask = Image.new("L", (size, size))
    for value, polygons in zip((255, 0), outlines(shape), strict=True):
        for points in polygons:
            points = (points * squeeze) @ rotation + centre
            ImageDraw.Draw(mask).polygon([tuple(p) for p in points], fill=value)
    fill = draw_texture(rng, fill, size, size)
    background = draw_texture(rng, background, size, size)
    return Image.composite(fill, background, mask)


def draw_image(seed):
    """Return a uint8 image (3, SIZE, SIZE) and its three class indices."""
    rng = np.random.default_rng(seed)
    shape, fill, background = rng.integers(0, 10, 3)
    textures = TEXTURES[fill], TEXTURES[background]
    image = draw_shape(rng, SHAPES[shape], SIZE, *textures)
    return pil_to_tensor(image), torch.tensor([shape, fill, background])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--images", type=int, default=24000, help="synthetic images")
    parser.add_argument("--epochs", type=positive, default=16, help="epochs")
    parser.add_argument("--batch-size", type=int, default=64, help="images per step")
    parser.add_argument("--to", default=WEIGHTS["tinyvgg"], help="file to write")
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.multiprocessing.set_sharing_strategy("file_system")
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        samples = pool.map(draw_image, range(args.images), chunksize=100)
        samples = list(tqdm(samples, "making images", total=args.images))
    images, labels = (torch.stack(column) for column in zip(*samples, strict=True))
    held_out = args.images // 12

    # BatchNorm speeds up training; at the end it is fused into the convolutions.
    features = vgg.make_layers(BACKBONES["tinyvgg"], batch_norm=True)
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 30))
    model = nn.Sequential(features, head).to(memory_format=torch.channels_last)
    batches = (args.images - held_out) // args.batch_size
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.01)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, 4e-3, total_steps=args.epochs * batches
    )

    for epoch in range(args.epochs):
        model.train()
        order = torch.randperm(args.images - held_out) + held_out
        order = order[: batches * args.batch_size].view(batches, -1)
        for batch in tqdm(order, f"epoch {epoch + 1} of {args.epochs}"):
            output = model(normalise(images[batch], MEAN, STD)).view(-1, 10, 3)
            loss = nn.functional.cross_entropy(output, labels[batch])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
        model.eval()
        with torch.inference_mode():
            output = model(normalise(images[:held_out], MEAN, STD)).view(-1, 10, 3)
            guesses = output.argmax(1)
        accuracy = (guesses == labels[:held_out]).float().mean(0) * 100
        print(
            f"epoch {epoch + 1}: loss {loss:.3f}; held-out accuracy: shape "
            f"{accuracy[0]:.1f} %, fill {accuracy[1]:.1f} %, "
            f"background {accuracy[2]:.1f} %",
            flush=True,
        )

    layers = []
    for layer in features:
        if isinstance(layer, nn.BatchNorm2d):
            layers[-1] = nn.utils.fusion.fuse_conv_bn_eval(layers[-1], layer)
        else:
            layers.append(layer)
    state = nn.Sequential(*layers).state_dict()
    state = {f"features.{k}": v.contiguous() for k, v in state.items()}
    torch.save(state, args.to)
    print(f"Saved {args.to}")


if __name__ == "__main__":
    run(main)
