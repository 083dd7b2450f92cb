"""Bytes that a rank holds and sends while a script runs, for measure_memory.py."""

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

import memory_formulas as formulas

# How many times a ring sends (N - 1) / N of the data; see memory_formulas.py.
RINGS = {"allreduce_": 2, "all_reduce": 2, "_allgather_base_": 1}
RINGS |= {"_reduce_scatter_base_": 1, "broadcast_": 1}


def to_local(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class MemoryTracker(TorchDispatchMode):
    """Counts the bytes that this rank holds and sends while a script runs.

    sent: bytes sent in all steps but the first, by collectives on a ring.
    peak_saved: most bytes that autograd saved at once for the backward pass, without
    parameters. held: bytes of parameters, gradients and optimizer state.
    """

    def __init__(self, steps, nested):
        """steps: of the run; nested: the optimizer has an inner one."""
        super().__init__()
        self.last_step, self.nested = steps, nested
        self.storages, self.held = {}, None
        self.sent, self.steps, self.saved, self.peak_saved = 0, 0, 0, 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        space, name = op.name().split("::")
        is_collective = space in ("c10d", "_c10d_functional")
        if is_collective and 0 < self.steps < self.last_step:
            self.sent += sent_bytes(name.split(".")[0], args)
        return op(*args, **(kwargs or {}))

    def pack(self, tensor):
        """Count a tensor that autograd saves; tensors may share a storage."""
        base = tensor if tensor._base is None else tensor._base
        if base.is_leaf and base.requires_grad:  # a parameter
            return tensor
        tensor = tensor.detach()  # else a reference cycle keeps it alive
        storage = to_local(tensor).untyped_storage()
        count = self.storages.get(storage.data_ptr(), 0)
        self.storages[storage.data_ptr()] = count + 1
        self.saved += storage.nbytes() * (count == 0)
        self.peak_saved = max(self.peak_saved, self.saved)
        return SavedTensor(self, tensor, storage)

    def after_step(self, optimizer, *_):
        """Record what the rank holds; the first step is a warm-up."""
        inner = optimizer.optim if hasattr(optimizer, "optim") else optimizer
        if self.nested and inner is optimizer:
            return
        tensors = [p for group in optimizer.param_groups for p in group["params"]]
        states = [v for s in inner.state.values() for v in s.values()]
        states = [v for v in states if torch.is_tensor(v) and v.dim()]
        gradients = [p.grad for p in tensors if p.grad is not None]
        parts = tensors, gradients, states
        self.held = [sum(to_local(t).nbytes for t in part) for part in parts]
        if self.steps == 0:
            self.peak_saved = self.saved
        self.steps += 1


class SavedTensor:
    """A tensor saved by autograd; when freed, it is subtracted from the count."""

    def __init__(self, tracker, tensor, storage):
        self.tracker, self.tensor = tracker, tensor
        self.address, self.size = storage.data_ptr(), storage.nbytes()

    def __del__(self):
        storages = self.tracker.storages
        storages[self.address] -= 1
        self.tracker.saved -= self.size * (storages[self.address] == 0)


def unpack(saved):
    return saved.tensor if isinstance(saved, SavedTensor) else saved


def sent_bytes(op, args):
    """Return the bytes that a rank sends in a ring collective or a send.

    op: its name in c10d, or in _c10d_functional, where the last of args names the
    group. Other operations count as 0.
    """
    if op not in RINGS and op != "send":
        return 0
    data = args[0] if torch.is_tensor(args[0]) else args[0][0]
    if op == "send":
        return data.nbytes
    # Of input and output, the larger one is the whole tensor.
    size = max(arg.nbytes for arg in (data, args[1]) if torch.is_tensor(arg))
    group = next((a for a in args if isinstance(a, torch.ScriptObject)), None)
    if group is not None:
        group = dist.ProcessGroup.unbox(group)
    else:
        group = dist.distributed_c10d._resolve_process_group(args[-1])
    return RINGS[op] * formulas.ring_share(group.size()) * size
