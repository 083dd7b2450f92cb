"""Loaded with PyTorch into each process that a test starts: what a GPU would refuse.

A CPU lets pass what ends a run on GPUs, or costs memory there. So these raise here:
a collective on a tensor that was not made on the device of the process, and
dist.barrier() and torch.load() without a device. PyTorch loads what a package names
under "torch.backends" (rules-1.dist-info), if its folder is in PYTHONPATH.

The machine seems to be idle here, or check.py would say how busy the tests keep it.
"""

import functools
import os
import sys

COLLECTIVES = "all_reduce", "reduce", "broadcast", "all_gather", "gather", "scatter"
COLLECTIVES += "all_gather_into_tensor", "reduce_scatter", "reduce_scatter_tensor"
COLLECTIVES += "all_to_all", "all_to_all_single", "send", "recv"
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

    os.getloadavg = lambda: (0.0, 0.0, 0.0)
    wrap(torch, "load", check_load)
    # The checkup looks at each call itself, and would see ours.
    if "RANK" not in os.environ or sys.argv[0].endswith(("checkup", "__main__.py")):
        return
    wrap(torch.distributed, "barrier", check_barrier)
    leaves = torch.utils._pytree.tree_leaves

    def tensors(*values):
        return [t for t in leaves(values) if isinstance(t, torch.Tensor)]

    def was_made_on_host(tensor):
        return getattr(tensor, "made_on_host", False)

    def check_collective(name, args, kwargs):
        if any(was_made_on_host(tensor) for tensor in tensors(args, kwargs)):
            raise AssertionError(
                f"{name}() of a tensor that was made without device="
            )

    for name in COLLECTIVES:
        wrap(torch.distributed, name, check_collective)

    class NoteWhere(torch.overrides.TorchFunctionMode):
        """Note of each tensor whether it was made, or computed, on the host."""

        def __torch_function__(self, func, types, args=(), kwargs=None):
            kwargs = kwargs or {}
            result, given = func(*args, **kwargs), tensors(args, kwargs)
            if not isinstance(result, torch.Tensor | tuple):
                return result
            if getattr(func, "__name__", "") in MAKE and not given:
                on_host = kwargs.get("device") is None
            else:
                on_host = bool(given) and all(was_made_on_host(t) for t in given)
            devices = [a for a in args if isinstance(a, torch.device)]
            if "device" in kwargs or devices:  # on a CPU it is the same tensor
                on_host = False
            for tensor in tensors(result):
                tensor.made_on_host = on_host
            return result

    NoteWhere().__enter__()
