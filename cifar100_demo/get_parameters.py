"""Parameters, FLOPs and memory of training a ResNet, calculated without a GPU.

    python get_parameters.py [--arch resnet152] [--batch-size 128] [--image-size 224]

A FLOP is one addition or one multiplication. Tables that count a multiplication and
an addition as one FLOP show half of these numbers.
"""

import argparse
import math

import torch
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode
from torchvision import models

from common.errors import run

ARCHS = [name for name in models.list_models(models) if "resne" in name]


def count_costs(arch, batch_size, image_size, classes=100):
    """Return the costs of one training step in float32, as a dict.

    "parameters": the number of parameters.
    "forward", "training": FLOPs per image in convolutions and matrix products,
    without and with the backward pass.
    "activations": bytes that the forward pass of a batch saves for the backward
    pass.
    """
    with torch.device("meta"):  # tensors have shapes but no data
        model = models.get_model(arch, num_classes=classes)
        images = torch.empty(batch_size, 3, image_size, image_size)
        labels = torch.empty(batch_size, dtype=torch.long)
    saved = {}  # one entry per storage: in-place layers share it

    def save(tensor):
        saved[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
        return tensor

    with FlopCounterMode(display=False) as counter:
        with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
            loss = F.cross_entropy(model(images), labels)
        forward = counter.get_total_flops()
        loss.backward()
    for parameter in model.parameters():
        saved.pop(parameter.untyped_storage()._cdata, None)
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "forward": forward / batch_size,
        "training": counter.get_total_flops() / batch_size,
        "activations": sum(storage.nbytes() for storage in saved.values()),
    }


def format_flop(flop):
    """Return a number of FLOPs as text in MFLOP, GFLOP, TFLOP or PFLOP."""
    power = min(max(2, int(math.log10(flop) / 3)), 5)
    return f"{flop / 1000**power:.2f} {' kMGTP'[power]}FLOP"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arch", choices=ARCHS, default="resnet152", help="ResNet")
    parser.add_argument("--batch-size", type=int, default=128, help="images per GPU")
    parser.add_argument("--image-size", type=int, default=224, help="pixels a side")
    parser.add_argument("--classes", type=int, default=100, help="number of classes")
    args = parser.parse_args()
    costs = count_costs(args.arch, args.batch_size, args.image_size, args.classes)
    weights = costs["parameters"] * 4 / 1e9  # float32: 4 bytes each
    activations = costs["activations"] / 1e9
    step = costs["training"] * args.batch_size
    rows = {
        "parameters": f"{costs['parameters']:,}",
        "forward pass of an image": format_flop(costs["forward"]),
        "training step of an image": format_flop(costs["training"]),
        f"training step of a batch of {args.batch_size}": format_flop(step),
        "epoch of 50,000 images": format_flop(costs["training"] * 50000),
        "memory of the weights": f"{weights:.2f} GB",
        "... of their gradients": f"{weights:.2f} GB",
        "... of the optimizer (SGD with momentum)": f"{weights:.2f} GB",
        "... of a batch's activations": f"{activations:.2f} GB",
        "memory in all": f"{3 * weights + activations:.2f} GB",
    }
    print(f"{args.arch}, {args.image_size} x {args.image_size} pixels, float32")
    for name, value in rows.items():
        print(f"{name:42}{value:>16}")


if __name__ == "__main__":
    run(main)
