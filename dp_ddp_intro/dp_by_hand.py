"""DataParallel by hand: the bytes that a step on two GPUs copies, and the time.

    python dp_by_hand.py

It needs no GPU: tensors on the meta device have a size but no values. Bytes and
FLOPs are counted, and times are calculated from them.
"""

from collections import Counter

import torch
from torch import nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy
from torch.utils.flop_counter import FlopCounterMode
from torchvision.models import resnet152
from tqdm import tqdm

from common.errors import run
from model import Transformer

# From an A100's data sheet: bytes/s in one direction over 16 lanes of PCIe 4 and
# NVLink 3 (half of the sheet's value, which counts both directions); FLOP/s in TF32.
LINKS, PEAK = {"PCIe 4": 31e9, "NVLink 3": 300e9}, 156e12


def make_models():
    """Return {name: (model, inputs, targets)} with a global batch for two GPUs."""
    with torch.device("meta"):
        conv = nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU()
        head = nn.Flatten(), nn.Linear(9216, 128), nn.ReLU(), nn.Linear(128, 10)
        tokens = torch.zeros(2 * 16, 256, dtype=torch.long)
        labels = torch.zeros(2 * 128, dtype=torch.long)
        photos, digits = torch.zeros(256, 3, 224, 224), torch.zeros(256, 1, 28, 28)
        return {
            "transformer": (Transformer(), tokens, tokens),
            "ResNet-152": (resnet152(num_classes=100), photos, labels),
            "MNIST": (
                nn.Sequential(*conv, nn.MaxPool2d(2), *head),
                digits,
                labels,
            ),
        }


def count_bytes(tensors):
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def step(model, inputs, targets):
    """Run a step's forward and backward pass; return the loss and {part: bytes}.

    The first GPU holds the model and the batch, and all copies come from it or go to
    it. torch.nn.parallel calls the parts scatter, replicate, parallel_apply and
    gather.
    """
    first, second = inputs.chunk(2)
    weights = {name: weight.clone() for name, weight in model.named_parameters()}
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    copied = Counter()
    copied["inputs out"] = count_bytes([second])
    copied["weights out"] = count_bytes([*weights.values(), *buffers.values()])

    def count_gradient(gradient):
        copied["gradients of the weights back"] += count_bytes([gradient])

    for clone in weights.values():
        clone.register_hook(count_gradient)
    # On GPUs, two threads of one process do this at the same time.
    logits = model(first), functional_call(model, weights | buffers, second)
    copied["logits back"] = count_bytes(logits[1:])
    copied["gradients of the logits out"] = copied["logits back"]
    loss = cross_entropy(torch.cat(logits).flatten(0, -2), targets.flatten())
    # This adds the gradient of a clone to the weight's, as ReduceAdd does.
    loss.backward()
    return loss, copied


def main():
    rows, models = {}, make_models()
    bar = tqdm(models.items(), "counting", leave=False, disable=None)
    for name, (model, inputs, targets) in bar:
        with FlopCounterMode(display=False) as counter:
            _, copied = step(model, inputs, targets)
        # On two GPUs, an all-reduce sends all gradients each way.
        ddp = count_bytes(model.parameters())
        row = rows[name] = {f"{part}, MB": n / 1e6 for part, n in copied.items()}
        row["total, MB"] = copied.total() / 1e6
        for link, speed in LINKS.items():
            row[f"time over {link}, ms"] = 1000 * copied.total() / speed
        row["DDP: gradients each way, MB"] = ddp / 1e6
        for link, speed in LINKS.items():
            row[f"time over {link}, ms "] = 1000 * ddp / speed
        seconds = counter.get_total_flops() / 2 / PEAK
        row["arithmetic of the step, ms"] = 1000 * seconds
    print(" " * 36 + "".join(f"{name:>14}" for name in rows))
    for part in rows["MNIST"]:
        print(f"{part:36}" + "".join(f"{row[part]:14.2f}" for row in rows.values()))


if __name__ == "__main__":
    run(main)
