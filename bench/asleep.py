"""A net that sleeps where others compute: DDP on more nodes than there are cores.

python asleep.py SECONDS MEGABYTES

Its step takes so long, its gradients are so large. Under torchrun it is wrapped by
DDP. The median of its steps, in seconds, goes to logs/step. network.py starts it.
"""

import os
import time
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torch import nn

from common.cli import OptionParser, at_least


class Layer(torch.autograd.Function):
    """A layer that computes nothing, and takes its time for that."""

    @staticmethod
    def forward(ctx, x, weight, seconds):
        time.sleep(seconds)
        ctx.weight, ctx.seconds = weight, seconds
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(2 * ctx.seconds)
        return gradient, torch.zeros_like(ctx.weight), None


class Asleep(nn.Module):
    def __init__(self, seconds, megabytes):
        super().__init__()
        self.seconds = (
            seconds / 3 / megabytes
        )  # of the forward pass of a layer of 1 MB
        self.weights = nn.ParameterList(
            torch.zeros(250_000) for _ in range(megabytes)
        )

    def forward(self, x):
        for weight in self.weights:
            x = Layer.apply(x, weight, self.seconds)
        return x


def main():
    parser = OptionParser(__doc__)
    parser.add_argument("seconds", type=float, help="of a step")
    parser.add_argument("megabytes", type=at_least(1), help="of gradients")
    args = parser.parse_args()
    model, times = Asleep(args.seconds, args.megabytes), []
    if "RANK" in os.environ:
        dist.init_process_group("gloo")  # also where a GPU is: it computes nothing
        model = nn.parallel.DistributedDataParallel(model)
    for _ in range(8):  # the first two make DDP's buckets
        begin = time.perf_counter()
        model(torch.zeros(1, requires_grad=True)).sum().backward()
        times.append(time.perf_counter() - begin)
    Path("logs").mkdir(exist_ok=True)
    if os.environ.get("RANK", "0") == "0":
        Path("logs/step").write_text(str(median(times[2:])))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
