"""Runs a script of dp_ddp_intro as `python SCRIPT` would; saves what each rank saw.

    torchrun ... spy_beyond.py SCRIPT [OPTIONS]

It runs twice: with SGD in place of Adam, whose steps tell a sum of gradients from
their mean, and as it is. RANK.pt has the losses of all epochs of both, and of Adam's
last step what this rank holds: bytes of parameters, gradients and optimizer state.
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook

script, *options = sys.argv[1:]
sys.path.insert(0, str(Path(script).resolve().parent))
seen = {"losses": []}


def local(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def size(tensors):
    return sum(local(t).nbytes for t in tensors if torch.is_tensor(t) and t.dim())


def note(optimizer, *_):
    inner = getattr(optimizer, "optim", optimizer)  # what ZeRO steps of its own
    ours = [p for group in optimizer.param_groups for p in group["params"]]
    states = [value for state in inner.state.values() for value in state.values()]
    seen["parameters"] = size(ours)
    seen["gradients"] = size(p.grad for p in ours if p.grad is not None)
    seen["state"] = size(states)
    seen["weights"] = [local(p).detach().clone() for p in ours]


def noting_means(sums, *names):
    found = means(sums, *names)
    seen["losses"].append(found["loss"])
    return found


register_optimizer_step_post_hook(note)
# As on a GPU, where all parameters are stepped together.
for kind in ("adam", "sgd"):
    sys.modules[f"torch.optim.{kind}"]._default_to_fused_or_foreach = (
        lambda *_, **__: (False, True)
    )
module = __import__(Path(script).stem)
means, module.means = module.means, noting_means
adam, end = torch.optim.Adam, dist.destroy_process_group
dist.destroy_process_group = lambda: None  # one group for both runs
for optimizer, lr in ((torch.optim.SGD, "0.3"), (adam, "0.003")):
    torch.optim.Adam = optimizer
    sys.argv = [script, *options, "--lr", lr]
    module.main()
    dist.init_process_group = lambda: None
if dist.is_initialized():
    end()
torch.save(seen, f"{os.environ.get('RANK', 0)}.pt")
