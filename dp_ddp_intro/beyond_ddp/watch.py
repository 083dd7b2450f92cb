"""Counts what a rank holds and sends while a script runs: for measure_memory.py."""

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

import formulas

# How often a ring passes on (N - 1) / N of the data (formulas.py).
RINGS = {"allreduce_": 2, "all_reduce": 2, "_allgather_base_": 1}
RINGS |= {"_reduce_scatter_base_": 1, "broadcast_": 1}


def local(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class Watch(TorchDispatchMode):
    """Counts, while a script runs, what its rank holds and sends.

    sent: bytes as a ring sends them (formulas.share), in each step but the first.
    kept: the most bytes that autograd kept at once for the backward pass, without
    parameters. held: bytes of parameters, gradients and optimizer state.
    """

    def __init__(self, steps, nested):
        """steps: of the run; nested: in the optimizer is one that steps first."""
        super().__init__()
        self.last, self.nested, self.storages, self.held = steps, nested, {}, None
        self.sent, self.steps, self.now, self.kept = 0, 0, 0, 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        space, name = op.name().split("::")
        if space in ("c10d", "_c10d_functional") and 0 < self.steps < self.last:
            self.sent += ring_bytes(name.split(".")[0], args)
        return op(*args, **(kwargs or {}))

    def pack(self, tensor):
        """Note a tensor that is saved; several may share a storage."""
        base = tensor if tensor._base is None else tensor._base
        if base.is_leaf and base.requires_grad:  # a parameter
            return tensor
        tensor = tensor.detach()  # or it and what made it would hold each other
        storage = local(tensor).untyped_storage()
        count = self.storages.get(storage.data_ptr(), 0)
        self.storages[storage.data_ptr()] = count + 1
        self.now += storage.nbytes() * (count == 0)
        self.kept = max(self.kept, self.now)
        return Saved(self, tensor, storage)

    def step(self, optimizer, *_):
        """After an optimizer's step note what there is; the first is to warm up."""
        inner = optimizer.optim if hasattr(optimizer, "optim") else optimizer
        if self.nested and inner is optimizer:
            return
        tensors = [p for group in optimizer.param_groups for p in group["params"]]
        states = [v for s in inner.state.values() for v in s.values()]
        states = [v for v in states if torch.is_tensor(v) and v.dim()]
        gradients = [p.grad for p in tensors if p.grad is not None]
        parts = tensors, gradients, states
        self.held = [sum(local(t).nbytes for t in part) for part in parts]
        if self.steps == 0:
            self.kept = self.now
        self.steps += 1


class Saved:
    """A tensor that autograd keeps; when it lets go of it, the watch is told."""

    def __init__(self, watch, tensor, storage):
        self.watch, self.tensor = watch, tensor
        self.place, self.size = storage.data_ptr(), storage.nbytes()

    def __del__(self):
        self.watch.storages[self.place] -= 1
        self.watch.now -= self.size * (self.watch.storages[self.place] == 0)


def unpack(saved):
    return saved.tensor if isinstance(saved, Saved) else saved


def ring_bytes(op, args):
    """Return what a rank sends in this operation, if it goes round a ring.

    op: its name in c10d, or in _c10d_functional, where the last of args names the
    group. What is not in RINGS, and no send, counts as nothing.
    """
    if op not in RINGS and op != "send":
        return 0
    data = args[0] if torch.is_tensor(args[0]) else args[0][0]
    if op == "send":
        return data.nbytes
    # Of what is gathered or scattered, the whole; not the part of this rank.
    size = max(arg.nbytes for arg in (data, args[1]) if torch.is_tensor(arg))
    group = next((a for a in args if isinstance(a, torch.ScriptObject)), None)
    if group is not None:
        group = dist.ProcessGroup.unbox(group)
    else:
        group = dist.distributed_c10d._resolve_process_group(args[-1])
    return RINGS[op] * formulas.share(group.size()) * size
