"""DataParallel by hand: what a step on two GPUs copies, and how long that takes.

    python dp_by_hand.py

It needs no GPU: the steps are done with tensors that have sizes and no numbers. So
bytes and FLOPs are counted, and times calculated from them.
"""

import statistics
import sys
import time
from collections import Counter
from unittest.mock import patch

import torch
from torch import nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy
from torch.utils.flop_counter import FlopCounterMode
from torchvision.models import resnet152

from common.cli import OptionParser
from common.prepare import progress_bar
from model import Transformer

# An A100, by its data sheet: bytes/s in one direction, by 16 lanes of PCIe 4 and by
# NVLink 3 (half of what the sheet says, which counts both), and FLOP/s in TF32.
LINKS, PEAK = {"PCIe 4": 31e9, "NVLink 3": 300e9}, 156e12


def nets():
    """Return {name: (model, inputs, targets)}, of a whole batch for two GPUs."""
    with torch.device("meta"):
        convolutions = (
            nn.Conv2d(1, 32, 3),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3),
            nn.ReLU(),
        )
        top = nn.Flatten(), nn.Linear(9216, 128), nn.ReLU(), nn.Linear(128, 10)
        tokens = torch.zeros(2 * 16, 256, dtype=torch.long)
        labels = torch.zeros(2 * 128, dtype=torch.long)
        photos, digits = torch.zeros(256, 3, 224, 224), torch.zeros(256, 1, 28, 28)
        return {
            "transformer": (Transformer(), tokens, tokens),
            "ResNet-152": (resnet152(num_classes=100), photos, labels),
            "MNIST": (
                nn.Sequential(*convolutions, nn.MaxPool2d(2), *top),
                digits,
                labels,
            ),
        }


def size(tensors):
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def step(model, inputs, targets):
    """Do forward and backward pass of a step; return the loss, and {part: bytes}.

    The first GPU has the model and the batch. What is copied comes from it, or goes
    to it. torch.nn.parallel calls the parts scatter, replicate, parallel_apply, and
    gather.
    """
    first, second = inputs.chunk(2)
    weights = {name: weight.clone() for name, weight in model.named_parameters()}
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    copied = Counter()
    copied["inputs out"] = size([second])
    copied["weights out"] = size(weights.values()) + size(buffers.values())

    def come_back(gradient):
        copied["gradients of the weights back"] += size([gradient])

    for clone in weights.values():
        clone.register_hook(come_back)
    # On GPUs at the same time, in two threads of the one process.
    logits = model(first), functional_call(model, weights | buffers, second)
    copied["logits back"] = copied["gradients of the logits out"] = size(logits[1:])
    loss = cross_entropy(torch.cat(logits).flatten(0, -2), targets.flatten())
    # The gradient of a clone is added to that of the weight, as ReduceAdd does it.
    loss.backward()
    return loss, copied


def milliseconds_of_replicate(model, repeats=5):
    """Return how long Python works on replicas for two GPUs: a measured median.

    It is PyTorch's own replicate(), which a step calls before the forward pass, but
    nothing is copied.
    """
    module, seconds = sys.modules["torch.nn.parallel.replicate"], []
    copies = {t: t.detach() for t in (*model.parameters(), *model.buffers())}

    def no_copies(tensors, devices, detach=False):
        return [[copies[tensor] for tensor in tensors]] * len(devices)

    with patch.object(module, "_broadcast_coalesced_reshape", no_copies):
        for _ in range(repeats):
            start = time.perf_counter()
            module.replicate(model, [0, 1])
            seconds.append(time.perf_counter() - start)
    return 1000 * statistics.median(seconds)


def main():
    OptionParser(__doc__).parse_args()
    rows = {}
    for name, (model, inputs, targets) in progress_bar(nets().items(), "counting"):
        with FlopCounterMode(display=False) as counter:
            _, copied = step(model, inputs, targets)
        ddp = size(model.parameters())  # all-reduce: so much each way, on two GPUs
        row = rows[name] = {f"{part}, MB": n / 1e6 for part, n in copied.items()}
        row["in all, MB"] = copied.total() / 1e6
        for link, speed in LINKS.items():
            row[f"takes over {link}, ms"] = 1000 * copied.total() / speed
        row["DDP: gradients each way, MB"] = ddp / 1e6
        for link, speed in LINKS.items():
            row[f"takes over {link}, ms "] = 1000 * ddp / speed
        row["arithmetic of the step, ms"] = (
            1000 * counter.get_total_flops() / 2 / PEAK
        )
        row["Python's part of replicate, ms"] = milliseconds_of_replicate(model)
    print(" " * 36 + "".join(f"{name:>14}" for name in rows))
    for part in rows["MNIST"]:
        print(f"{part:36}" + "".join(f"{row[part]:14.2f}" for row in rows.values()))


if __name__ == "__main__":
    main()
