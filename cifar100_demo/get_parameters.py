"""Counts what training a ResNet takes: parameters, FLOPs, memory. It needs no GPU.

    python get_parameters.py [--arch resnet152] [--batch-size 128] [--image-size 224]

A FLOP is one addition or one multiplication. Tables of models often count a
multiplication and an addition together and call that a FLOP: half of ours.
"""

import math

import torch
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode
from torchvision import models

from common.cli import OptionParser, at_least

ARCHS = [name for name in models.list_models(models) if "resne" in name]


def count(arch, batch_size, image_size, classes=100):
    """Return a dict of what one training step in float32 takes.

    "parameters"; "forward" and "training", the FLOPs of an image's convolutions and
    matrix products, without and with the backward pass; "activations", the bytes of
    what the forward pass keeps for the backward pass, for the whole batch.
    """
    with torch.device("meta"):  # tensors with shapes and without data
        model = models.get_model(arch, num_classes=classes)
        images = torch.empty(batch_size, 3, image_size, image_size)
        labels = torch.empty(batch_size, dtype=torch.long)
    kept = {}  # by their memory, which layers that work in place share

    def keep(tensor):
        kept[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
        return tensor

    with FlopCounterMode(display=False) as counter:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            loss = F.cross_entropy(model(images), labels)
        forward = counter.get_total_flops()
        loss.backward()
    for parameter in model.parameters():
        kept.pop(parameter.untyped_storage()._cdata, None)
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "forward": forward / batch_size,
        "training": counter.get_total_flops() / batch_size,
        "activations": sum(storage.nbytes() for storage in kept.values()),
    }


def in_units(flop):
    """Return a number of FLOPs as text, in MFLOP, GFLOP, TFLOP or PFLOP."""
    power = min(max(2, int(math.log10(flop) / 3)), 5)
    return f"{flop / 1000**power:.2f} {' kMGTP'[power]}FLOP"


def main():
    parser = OptionParser(__doc__)
    add = parser.add_argument
    add("--arch", choices=ARCHS, default="resnet152", help="the net")
    add("--batch-size", type=at_least(1), default=128, help="images per GPU")
    add("--image-size", type=at_least(33), default=224, help="pixels of a side")
    add("--classes", type=at_least(1), default=100, help="to tell apart")
    args = parser.parse_args()
    counts = count(args.arch, args.batch_size, args.image_size, args.classes)
    weights = counts["parameters"] * 4 / 1e9  # float32 has 4 bytes
    activations = counts["activations"] / 1e9
    step = counts["training"] * args.batch_size
    rows = {
        "parameters": f"{counts['parameters']:,}",
        "forward pass of an image": in_units(counts["forward"]),
        "training step of an image": in_units(counts["training"]),
        f"training step of a batch of {args.batch_size}": in_units(step),
        "epoch of 50,000 images": in_units(counts["training"] * 50000),
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
    main()
