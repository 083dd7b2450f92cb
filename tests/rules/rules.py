"""Loaded with PyTorch into each process that a test starts: what a GPU would refuse.

A CPU lets pass what ends a run on GPUs, or costs memory there. So these raise here:
a collective on a tensor that was not made on the device of the process, and
dist.barrier() and torch.load() without a device. PyTorch loads what a package names
under "torch.backends" (rules-1.dist-info), if its folder is in PYTHONPATH.
"""

import functools
import os
import sys

COLLECTIVES = [
    "all_reduce",
    "reduce",
    "broadcast",
    "all_gather",
    "gather",
    "scatter",
]
COLLECTIVES += ["all_gather_into_tensor", "reduce_scatter", "reduce_scatter_tensor"]
COLLECTIVES += ["all_to_all", "all_to_all_single", "send", "recv"]
# Without device=, these make a tensor on the host.
MAKE = "tensor", "as_tensor", "zeros", "ones", "full", "empty", "arange", "rand"
MAKE += "randn", "randint", "randperm", "from_numpy"


def from_our_code():
    return (
        f"{os.sep}site-packages{os.sep}" not in sys._getframe(2).f_code.co_filename
    )


def wrap(owner, name, check):
    original = getattr(owner, name)

    @functools.wraps(original)
    def wrapper(*args, **kwargs):
        if from_our_code():
            check(name, args, kwargs)
        return original(*args, **kwargs)

    setattr(owner, name, wrapper)


def check_load(name, args, kwargs):
    if len(args) < 2 and "map_location" not in kwargs:
        raise AssertionError(
            "torch.load() without map_location: to the GPU that saved it"
        )


def check_barrier(name, args, kwargs):
    if not args and not kwargs:
        raise AssertionError("dist.barrier() without device_ids: on a GPU it warns")


def hold():
    import torch

    wrap(torch, "load", check_load)
    # The checkup looks at each call itself, and would see ours.
    if "RANK" not in os.environ or sys.argv[0].endswith("checkup.py"):
        return
    wrap(torch.distributed, "barrier", check_barrier)
    leaves = torch.utils._pytree.tree_leaves

    def tensors(*values):
        return [t for t in leaves(values) if isinstance(t, torch.Tensor)]

    def check_collective(name, args, kwargs):
        if any(getattr(t, "made_on_host", False) for t in tensors(args, kwargs)):
            raise AssertionError(
                f"{name}() of a tensor that was made without device="
            )

    for name in COLLECTIVES:
        wrap(torch.distributed, name, check_collective)

    class NoteWhere(torch.overrides.TorchFunctionMode):
        """Note of each tensor whether it was made, or computed, on the host."""

        def __torch_function__(self, func, types, args=(), kwargs=None):
            result, kwargs = func(*args, **(kwargs or {})), kwargs or {}
            name = getattr(func, "__name__", "")
            made = (
                tensors(result) if isinstance(result, torch.Tensor | tuple) else []
            )
            given = tensors(args, kwargs)
            host = bool(given) and all(getattr(t, "made_on_host", 0) for t in given)
            if name in MAKE and not given:
                host = kwargs.get("device") is None
            moves = "device" in kwargs or any(
                isinstance(a, torch.device) for a in args
            )
            if host and not moves:
                for tensor in made:
                    tensor.made_on_host = True
            elif moves:  # on a CPU it is the same tensor
                for tensor in made:
                    vars(tensor).pop("made_on_host", None)
            return result

    NoteWhere().__enter__()
