"""The operations of a training step, which the CPU must launch one by one.

    source common/env.sh
    cd bench
    python count_operations.py exercise8

A fast GPU waits for them if a model is small. Needs no GPU and no data. Counts what
the third step launches: in the script's passes and sums, and in its optimizer, by
each version of it. On GPUs PyTorch takes foreach, unless a script asks for fused.
Views do not count, since they launch nothing.
"""

import argparse
import sys
from collections import Counter
from importlib import import_module

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils._python_dispatch import TorchDispatchMode

from common.data import REPOSITORY
from common.errors import run
from timing import Batches
from tools.machine import REQUIRED_FILES

STEPS = 3  # the first ones fill caches
VERSIONS = {"loop": {}, "foreach": {"foreach": True}, "fused": {"fused": True}}
# The training set's images, labels and batch, as exercises.load_data() has them.
SHAPES = {
    "exercise8": ((3, 150, 150), 2, 25),
    "mnist_multigpu": ((1, 28, 28), 10, 128),
    "cifar100_demo": ((3, 32, 32), 100, 32),
    "cinic_lab": ((3, 32, 32), 10, 128),
}


class OperationCounter(TorchDispatchMode):
    """Counts operations by name, in the optimizer's last step and before it."""

    def __init__(self, version):
        super().__init__()
        self.version, self.steps, self.in_optimizer = version, 0, False
        self.training, self.optimizer = Counter(), Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        counts = func.namespace != "profiler" and not func.is_view
        if self.steps == STEPS - 1 and counts:
            part = self.optimizer if self.in_optimizer else self.training
            part[str(func.overloadpacket)] += 1
        return func(*args, **kwargs or {})

    def __enter__(self):
        self.hooks = [
            register_optimizer_step_pre_hook(self.start_step),
            register_optimizer_step_post_hook(self.end_step),
        ]
        return super().__enter__()

    def __exit__(self, *error):
        for hook in self.hooks:
            hook.remove()
        return super().__exit__(*error)

    def start_step(self, optimizer, *_):
        self.in_optimizer = True
        for group in optimizer.param_groups:
            group |= {"foreach": False, "fused": False} | self.version

    def end_step(self, *_):
        self.in_optimizer = False
        self.steps += 1


def make_batch(exercise):
    """Return a batch of random images or tokens, and labels."""
    if exercise == "dp_ddp_intro":
        tokens = torch.randint(256, (16, 257))
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    shape, classes, size = SHAPES[exercise]
    images = torch.randint(256, (size, *shape), dtype=torch.uint8)
    labels = torch.randint(classes, (size,))
    return images, labels.float() if classes == 2 else labels


def count(exercise, script, option, version):
    """Return a counter, and the sum of all weights after its steps."""
    exercises = import_module("exercises")
    torch.manual_seed(0)
    device = torch.device("cpu")
    _, model, train = exercises.start(exercise, script, option, device)
    batches = Batches(make_batch(exercise), STEPS)
    with OperationCounter(version) as counter:
        train(batches)
    return counter, sum(p.double().sum().item() for p in model.parameters())


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("exercise", choices=REQUIRED_FILES, help="lesson's folder")
    parser.add_argument("--names", action="store_true", help="list the operations")
    args = parser.parse_args()
    sys.path.insert(0, str(REPOSITORY / args.exercise))
    script, _, option = import_module("exercises").SCRIPTS[args.exercise][-1]
    print(f"{script}.py\nforward, backward, sums  optimizer         weights' sum")
    for name, version in VERSIONS.items():
        try:
            counter, weights = count(args.exercise, script, option, version)
        except TypeError:  # Adadelta has no fused version
            continue
        training, optimizer = counter.training.total(), counter.optimizer.total()
        print(f"{training:23}  {optimizer:9} {name:8} {weights:.10f}")
    if args.names:
        for operation, number in counter.training.most_common():
            print(f"{number:4} {operation}")


if __name__ == "__main__":
    run(main)
