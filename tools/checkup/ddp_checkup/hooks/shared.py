"""What all hooks need: how a function is wrapped, and checksums of tensors."""

import functools
import random
import sys
import zlib
from types import FunctionType

import torch
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from ddp_checkup.record import HERE, is_library, record, state

BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
WRAPPERS = {}  # by the id of what they wrap
# What lies between a hook and its caller; the second one if torch.compile is used.
HOOK_FILES = HERE, "/torch/_dynamo/eval_frame.py"


def call(hook, *args):
    """Call a hook; keep_out_of_graphs() is about this."""
    return hook(*args)


def keep_out_of_graphs():
    global call
    call = torch.compiler.disable(call)


def file_of_caller():
    """Return the file of the code that called the function with this hook."""
    frame = sys._getframe(1)
    while any(file in frame.f_code.co_filename for file in HOOK_FILES):
        frame = frame.f_back
    return frame.f_code.co_filename


def set_record(name):
    """Return a hook that sets a field of the record."""
    return lambda *_: setattr(record, name, True)


def wrap(owner, name, before=None, after=None, during="runs"):
    """Call before(name, arguments), the function, and after(result, arguments).

    during: the field of `state` that holds the name meanwhile: monitor.py looks at
    `waiting` and `busy`, whose functions may wait for other ranks.
    """
    original = getattr(owner, name)

    @functools.wraps(original)
    def wrapper(*args, **kwargs):
        if torch.compiler.is_compiling():  # hooks are no part of a graph
            return original(*args, **kwargs)
        state.events += 1
        values = [*args, *kwargs.values()]
        if before:
            call(before, name, values)
        old = getattr(state, during, "")
        setattr(state, during, name)
        try:
            result = original(*args, **kwargs)
        finally:
            setattr(state, during, old)
            state.events += 1
        if after:
            call(after, result, values)
        return result

    # torch.jit.script compiles what this returns: the wrapper has other globals.
    wrapper.__prepare_scriptable__ = lambda: original
    WRAPPERS[id(original)] = wrapper
    setattr(owner, name, wrapper)


def rebind():
    """Replace what the user's modules have imported before: in a spawned process."""
    for module in [*sys.modules.values()]:
        if is_library(getattr(module, "__file__", None) or "<"):
            continue
        # The functions of a spawned process's main module have globals of their own.
        functions = [v for v in vars(module).values() if isinstance(v, FunctionType)]
        for names in [vars(module), *(f.__globals__ for f in functions)]:
            for name, value in [*names.items()]:
                names[name] = WRAPPERS.get(id(value), value)


def tensors_of(values):
    """Return the tensors in arguments, but for DTensors."""
    leaves = tree_leaves(values)
    leaves = [v for v in leaves if isinstance(v, torch.Tensor)]
    return [v for v in leaves if not isinstance(v, DTensor)]


def has_bits(t):
    """Return whether a tensor's elements lie in memory one after another."""
    return t.layout == torch.strided and not (t.is_nested or t.is_meta)


def bits_of(t):
    t = t.detach().resolve_conj().resolve_neg()
    t = torch.view_as_real(t) if t.is_complex() else t
    return t.contiguous().view(BITS[t.element_size()])


def checksums(tensors, device="cpu"):
    """Return a tensor (N,) of the sums of all bits; 0 where there are none."""
    found = []
    for t in tensors:
        if t is None or not has_bits(t):
            t = torch.zeros(1, device=device)
        bits = bits_of(t)
        found.append(bits.sum(dtype=bits.dtype))
    if len({t.dtype for t in found}) > 1:
        found = [t.long() for t in found]
    # A model may be spread over several GPUs.
    found = [t.to(found[0].device, non_blocking=True) for t in found]
    return torch.stack(found) if found else torch.zeros(0)


def contents(values):
    """Return [(shape, checksum)] of the tensors in a batch or in arguments.

    Values are also weighted by position: sums of labels may be equal by chance.
    A tensor whose elements are all equal has the checksum 0: it says nothing.
    """
    found = []
    for t in tree_leaves(values):
        plain = isinstance(t, torch.Tensor) and not hasattr(t, "device_mesh")
        if not plain or not has_bits(t) or t.numel() < 4:
            continue
        bits = bits_of(t).flatten()
        part = bits[:4096].long()
        places = torch.arange(1, len(part) + 1, device=t.device)
        varies = (part != part[0]).any().long()
        total = bits.sum() + (part * places).sum() * 1_000_003
        found.append((tuple(t.shape), total * varies))
    return found


def samples(batch):
    """Return the checksums (N,) of a batch's samples, by number of the tensor."""
    found = {}
    for number, t in enumerate(tree_leaves(batch)):
        plain = isinstance(t, torch.Tensor) and not hasattr(t, "device_mesh")
        if plain and has_bits(t) and t.dim() > 1 and t[:1].numel() >= 4:
            bits = bits_of(t).flatten(1)[:, :4096].long()
            places = torch.arange(1, bits.shape[1] + 1, device=t.device)
            found[number] = bits.sum(1) + (bits * places).sum(1) * 1_000_003
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
