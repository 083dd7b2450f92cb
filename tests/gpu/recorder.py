"""A recorder of a training script's losses and waits in one rank.

PyTorch reports each call of a loss function and, on a GPU, each wait for the GPU
(set_sync_debug_mode). Random numbers are drawn on the CPU, so that a GPU trains on
the same crops and with the same dropout as a CPU: then only rounding differs.
"""

import hashlib
import json
import sys
import warnings
from collections import Counter
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from statistics import median
from traceback import walk_stack

import torch
from torch.nn import functional as F
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

WARNING = "called a synchronizing CUDA operation"
LOSSES = F.cross_entropy, F.nll_loss, F.binary_cross_entropy_with_logits
# Files of PyTorch that wait in each step, whatever a script does, and who waits.
PYTORCH_WAITS = {
    "torch/amp/grad_scaler.py": "fp16's GradScaler",
    "torch/nn/modules/_functions.py": "SyncBatchNorm",
}


class LossRecorder(TorchFunctionMode):
    """Keeps each batch's loss, on its device: to read it there would wait."""

    def __init__(self):
        super().__init__()
        self.training, self.evaluation = [], []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **kwargs or {})
        if func in LOSSES:
            part = self.training if torch.is_grad_enabled() else self.evaluation
            part.append(result.detach())
        return result

    def read(self):
        """Return {"training": [each batch's loss], "evaluation": [the same]}."""
        parts = {"training": self.training, "evaluation": self.evaluation}
        return {
            name: [round(loss.item(), 6) for loss in part]
            for name, part in parts.items()
        }


class DrawOnCPU(TorchDispatchMode):
    """Draws all random numbers on the CPU, the same ones on each kind of CPU."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        if func is torch.ops.aten.native_dropout.default:  # a GPU's
            inputs, probability, _ = args
            mask = torch.rand(inputs.shape).lt(1 - probability)  # as a CPU's
            mask = mask.to(inputs.device, non_blocking=True)
            return inputs * mask / (1 - probability), mask
        if func is torch.ops.aten.bernoulli_.float:  # a CPU's dropout
            probability = args[1] if len(args) > 1 else 0.5  # it leaves defaults out
            return args[0].copy_(torch.rand(args[0].shape).lt(probability))
        if "device" in kwargs:  # torch.randint(..., device=device)
            device = kwargs["device"]
            drawn = func(*args, **kwargs | {"device": "cpu"})
            return drawn.to(device, non_blocking=True)
        target, *rest = args  # tensor.uniform_(...)
        if not isinstance(target, torch.Tensor) or target.device.type == "cpu":
            return func(*args, **kwargs)
        drawn = func(torch.empty_like(target, device="cpu"), *rest, **kwargs)
        return target.copy_(drawn, non_blocking=True)


class WaitCounter:
    """Counts in which steps a script waits for its GPU, and at which line."""

    def __init__(self):
        self.total, self.steps, self.lines = 0, [], Counter()
        self.optimizer = None
        self.show, self.hook = warnings.showwarning, None

    def __enter__(self):
        warnings.filterwarnings("always", message=WARNING)
        warnings.showwarning = self.note
        self.hook = register_optimizer_step_post_hook(self.count_step)
        return self

    def __exit__(self, *_):
        warnings.showwarning = self.show
        self.hook.remove()
        if torch.cuda.is_initialized():
            torch.cuda.set_sync_debug_mode("default")

    def note(self, message, category, filename, number, *more):
        if WARNING not in str(message):
            return self.show(message, category, filename, number, *more)
        pytorch, line = find_waiter()
        self.lines[pytorch or line or f"{Path(filename).name}:{number}"] += 1
        self.total += pytorch is None

    def count_step(self, optimizer, *_):
        self.optimizer = optimizer
        if torch.accelerator.device_count():  # only now: the script picks its GPU
            module = torch.get_device_module()
            if hasattr(module, "set_sync_debug_mode"):
                module.set_sync_debug_mode("warn")
        self.steps.append(self.total)

    def read(self):
        """Return the steps, the median waits in one, and the lines that wait most.

        What PyTorch itself waits for is in the lines alone.
        """
        waits = [after - before for before, after in pairwise(self.steps)]
        found = {"steps": len(self.steps), "waits": median(waits) if waits else None}
        return found | {"lines": dict(self.lines.most_common(5))}


def find_waiter():
    """Return what of PYTORCH_WAITS is at work, or None, and the script's line.

    The warning itself names this file, whose modes stand between the script and
    PyTorch.
    """
    pytorch = line = None
    for frame, number in walk_stack(None):
        file = frame.f_code.co_filename
        for ending in filter(file.endswith, PYTORCH_WAITS):
            pytorch = PYTORCH_WAITS[ending]
        if file.startswith(sys.path[0]):  # the script's folder
            line = line or f"{Path(file).name}:{number}"
    return pytorch, line


class Freezer:
    """Freezes the weights after an optimizer's first step, by a learning rate of 0.

    Each step of a CNN with BatchNorm multiplies what rounding has changed, up to a
    hundredfold: after five steps two devices have nothing to compare.
    """

    def __init__(self):
        self.seen = set()

    def __call__(self, optimizer, *_):
        """Prepare an optimizer's step; for register_optimizer_step_pre_hook()."""
        if optimizer in self.seen:
            for group in optimizer.param_groups:
                group["lr"] = 0.0
        self.seen.add(optimizer)


def hash_weights(optimizer):
    """Return a hash of the trained weights: equal replicas have the same."""
    digest = hashlib.sha256()
    for group in optimizer.param_groups:
        for weights in group["params"]:
            digest.update(weights.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]


def record(module, rank, draw_on_cpu, freeze=False):
    """Make main() save its waits in RANK.json; for Run(patch=...) of run_ranks.py.

    draw_on_cpu: also the losses of each batch, on the CPU's random numbers; freeze:
    change the weights in the first step only.
    """
    main, losses, waits = module.main, LossRecorder(), WaitCounter()

    def recording_main():
        with ExitStack() as stack:
            stack.enter_context(waits)
            if draw_on_cpu:  # not all that PyTorch compiles or shards runs in a mode
                stack.enter_context(losses)
                stack.enter_context(DrawOnCPU())
            if freeze:
                register_optimizer_step_pre_hook(Freezer())
            main()
        found = waits.read()
        if draw_on_cpu:
            weights = hash_weights(waits.optimizer)
            found |= losses.read() | {"weights": weights}
        Path(f"{rank}.json").write_text(json.dumps(found))

    module.main = recording_main
