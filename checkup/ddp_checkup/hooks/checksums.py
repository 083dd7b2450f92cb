"""Checksums of tensors, which stay on their device until the script has ended."""

import functools
import random
import sys
import zlib

import torch
from torch.utils._pytree import tree_leaves

BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
BLOCK = 1 << 16  # elements whose places all differ
FEW = 4  # tensors with fewer elements may be equal by chance
PART = 4096  # elements of a sample that its checksum covers


def is_dtensor(value):
    """Return whether this is a DTensor, whose module few scripts import."""
    return hasattr(value, "device_mesh")


def has_bits(value):
    """Return whether this is a tensor whose elements lie in memory as they are."""
    if not isinstance(value, torch.Tensor) or is_dtensor(value):
        return False
    return value.layout == torch.strided and not (value.is_nested or value.is_meta)


def bits_of(tensor):
    """Return the elements (N,) of a tensor as integers."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return tensor.contiguous().view(BITS[tensor.element_size()]).flatten()


@functools.cache
def places(number, device):
    return torch.arange(1, number + 1, device=device)


def checksum(tensor):
    """Return the sum of all bits as int64, weighted by their places.

    Without the places, a tensor with its signs or rows exchanged has the same sum.
    """
    bits = bits_of(tensor)
    rows = len(bits) // BLOCK
    rest = bits[rows * BLOCK :]
    total = (rest * places(BLOCK, bits.device)[: len(rest)]).sum()
    if rows:
        block = bits[: rows * BLOCK].view(rows, BLOCK)
        by_row = (block * places(BLOCK, bits.device)).sum(1)
        total = total + (by_row * (torch.arange(rows, device=bits.device) + 7)).sum()
    return total


def checksums(tensors, device="cpu"):
    """Return the checksums (N,) of these tensors; 0 for values without bits."""
    found = [
        checksum(t) if has_bits(t) else torch.zeros((), dtype=torch.int64)
        for t in tensors
    ]
    # A model may be spread over several GPUs.
    where = next((t.device for t in found if t.device.type != "cpu"), device)
    found = [t.to(where, non_blocking=True) for t in found]
    return torch.stack(found) if found else torch.zeros(0, dtype=torch.int64)


def contents(values):
    """Return [(shape, checksum)] of the tensors in a batch or in arguments.

    A tensor whose elements are all equal proves nothing, so its checksum is 0.
    """
    found = []
    for t in tree_leaves(values):
        if has_bits(t) and t.numel() >= FEW:
            bits = bits_of(t)
            varies = (bits[:PART] != bits[0]).any()
            found.append((tuple(t.shape), checksum(t) * varies))
    return found


def sample_checksums(batch):
    """Return the checksums (N,) of a batch's samples, by number of the tensor."""
    found = {}
    for number, t in enumerate(tree_leaves(batch)):
        if has_bits(t) and t.dim() > 1 and t[:1].numel() >= FEW:
            bits = bits_of(t).view(len(t), -1)[:, :PART]
            found[number] = (bits * places(bits.shape[1], bits.device)).sum(1)
    return found


def random_states(device=None):
    """Return checksums of the states of all random number generators, by name."""
    states = {"PyTorch's generator": torch.get_rng_state().numpy().tobytes()}
    if device is not None and device.type != "cpu":
        gpu = torch.get_device_module(device).get_rng_state()
        states["the GPU's generator"] = gpu.numpy().tobytes()
    states["Python's random"] = repr(random.getstate()).encode()
    if "numpy" in sys.modules:
        _, keys, *others = sys.modules["numpy"].random.get_state()
        states["NumPy's generator"] = repr(others).encode() + keys.tobytes()
    return {name: zlib.crc32(value) for name, value in states.items()}
