"""A training script that runs unchanged, with a record of its losses and waits.

PyTorch reports each call of a loss function and, on a GPU, each wait for the GPU
(set_sync_debug_mode). Random numbers are drawn on the CPU, so that a GPU trains on
the same crops and with the same dropout as a CPU: then only rounding differs.
"""

import hashlib
import runpy
import warnings
from collections import Counter
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from statistics import median

import torch
from torch.nn import functional as F
from torch.optim.optimizer import register_optimizer_step_post_hook
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
        """Return {"training": [loss of each step], "evaluation": mean, or None}."""
        training, evaluation = (
            [round(loss.item(), 6) for loss in part]
            for part in (self.training, self.evaluation)
        )
        mean = sum(evaluation) / len(evaluation) if evaluation else None
        return {"training": training, "evaluation": mean}


class DrawOnCPU(TorchDispatchMode):
    """Draws all random numbers on the CPU, the same ones on each kind of CPU."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        if func is torch.ops.aten.native_dropout.default:  # a GPU's
            inputs, probability, _ = args
            mask = torch.rand(inputs.shape).ge(probability)
            mask = mask.to(inputs.device, non_blocking=True)
            return inputs * mask / (1 - probability), mask
        if func is torch.ops.aten.bernoulli_.float:  # a CPU's dropout
            probability = args[1] if len(args) > 1 else 0.5  # it leaves defaults out
            return args[0].copy_(torch.rand(args[0].shape).lt(probability))
        if "device" in kwargs:  # torch.randint(..., device=device)
            device = kwargs["device"]
            return func(*args, **kwargs | {"device": "cpu"}).to(device)
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
        *_, package = filename.rpartition("site-packages/")
        who = PYTORCH_WAITS.get(package)
        self.lines[who or f"{Path(filename).name}:{number}"] += 1
        self.total += who is None

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


def hash_weights(optimizer):
    """Return a hash of the trained weights: equal replicas have the same."""
    digest = hashlib.sha256()
    for group in optimizer.param_groups:
        for weights in group["params"]:
            digest.update(weights.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]


def run_and_record(script, draw_on_cpu):
    """Run a script as `python SCRIPT`, with sys.argv's options; return its record.

    draw_on_cpu: also record the losses of each batch, on the CPU's random numbers.
    """
    losses, waits = LossRecorder(), WaitCounter()
    with ExitStack() as stack:
        stack.enter_context(waits)
        if draw_on_cpu:  # not all that PyTorch compiles or shards runs in a mode
            stack.enter_context(losses)
            stack.enter_context(DrawOnCPU())
        runpy.run_path(str(script), run_name="__main__")
    if not draw_on_cpu:
        return waits.read()
    weights = {"weights": hash_weights(waits.optimizer)}
    return losses.read() | weights | waits.read()
