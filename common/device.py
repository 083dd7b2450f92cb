"""Which process this is, which device is its own, and its fastest number format."""

import ctypes
import faulthandler
import functools
import os
import platform
import re
import signal
import sys
import warnings
from contextlib import suppress

import torch

from common.cli import UserError

OTHER = "type `TORCH=cu126 make venv`, or see docs/CLUSTER.md#which-pytorch"
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": None}


def get_ranks():
    """Return (rank, local_rank, world_size), as torchrun gave them to this process.

    rank counts the processes of the job, local_rank those of this node. Raises
    UserError if torchrun did not start this process.
    """
    names = "RANK", "LOCAL_RANK", "WORLD_SIZE"
    if not {*names} <= {*os.environ}:
        script = sys.argv[0]
        how = f"python -m common.torchrun --standalone --nproc-per-node=2 {script}"
        raise UserError(f"{script} wants one process per GPU: type `{how}`")
    if folder := os.environ.get("RANKS_TELL"):
        tell(f"{folder}/{os.environ['RANK']}.{os.getpid()}")
    return tuple(int(os.environ[name]) for name in names)


def tell(file):
    """When common.torchrun asks by SIGUSR2, write to this file which code runs."""
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # until then, and when Python ends
    calls = os.open(file, os.O_CREAT | os.O_APPEND | os.O_WRONLY)
    faulthandler.register(signal.SIGUSR2, calls, all_threads=False)
    with suppress(AttributeError):  # prctl(2), of Linux: end when torchrun is killed
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)


@functools.cache  # PyTorch says only once what is wrong with a driver
def find_gpus():
    """Return (type, count, why) of the GPUs here that this PyTorch can use.

    type: "cuda" (AMD's too), "xpu" and so on, or "cpu" for none; why: a line, empty
    unless there are GPUs that it cannot use.
    """
    kind = torch.accelerator.current_accelerator()
    # Apple's GPU is left out: there is one of it, and DDP has no backend for it.
    if kind is None or kind.type == "mps":
        return "cpu", 0, ""
    module = torch.get_device_module(kind)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        available = module.is_available()
    if not available:
        why = "".join(str(warning.message) for warning in caught[:1])
        if "too old" in why:  # of the driver; PyTorch's own words take five lines
            why = f"{why.split('. ')[0]} for PyTorch {torch.__version__}: {OTHER}"
        return "cpu", 0, " ".join(why.split())
    count = torch.accelerator.device_count()
    if kind.type == "cuda" and torch.version.cuda:
        built = torch.cuda.get_arch_list()
        chips = {module.get_device_capability(i): i for i in range(count)}
        if not any(has_code(built, chip) for chip in chips):
            chip, name = min(chips), module.get_device_name(chips[min(chips)])
            why = f"PyTorch {torch.__version__} has no code for {name} (sm_%d%d)"
            return "cpu", 0, f"{why % chip}: {OTHER}"
    return kind.type, count, ""


def has_code(built, chip):
    """Say whether a PyTorch built for these, such as "sm_80", runs on this chip.

    chip: (major, minor). Code for sm_XY runs where the major number is the same and
    the minor one not lower, compute_XY also on all newer chips:
    https://docs.nvidia.com/cuda/ampere-compatibility-guide
    """
    for kind, major, minor in re.findall(r"(sm|compute)_(\d+)(\d)", " ".join(built)):
        lowest = int(major), int(minor)
        if lowest <= chip and (kind == "compute" or lowest[0] == chip[0]):
            return True
    return False


def get_device(local_rank=None, *, gpu=None):
    """Return this node's GPU of that number, or the CPU if the node has no GPU.

    A script for one process gives no local_rank; it may name a gpu. Raises UserError
    if it was started as several, if there are more processes than GPUs on this node,
    if there is no such GPU, or if Slurm gave GPUs and PyTorch sees none.
    """
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if local_rank is None and int(os.environ.get("WORLD_SIZE", 1)) > 1:
        what = f"{sys.argv[0]} is for one process: type `python {sys.argv[0]}`, or"
        raise UserError(f"{what} start its multi-GPU twin")
    kind, gpus, why = find_gpus()
    if gpu is not None and gpu >= gpus:
        raise UserError(f"no GPU {gpu} here: there are {gpus}, counted from 0")
    if not gpus:
        given = int(os.environ.get("SLURM_GPUS_ON_NODE") or 0)
        names = "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"
        hidden = {os.environ.get(name) for name in names} & {"", "-1"}
        if given and not hidden:
            none = (
                f"PyTorch {torch.__version__} sees none of this job's {given} GPUs"
            )
            none += ": start ../bench/check.py in the same way, which says why, or"
            none += " type `export CUDA_VISIBLE_DEVICES=-1` to use CPUs"
            raise UserError(why or none)
        if why and not hidden and os.environ.get("RANK", "0") == "0":
            print(f"Warning: {why}. Now on CPU cores", file=sys.stderr, flush=True)
        return torch.device("cpu")
    if processes > gpus:
        raise UserError(
            f"{processes} processes, but {gpus} GPU on this node: type "
            f"--nproc-per-node={gpus}, or CUDA_VISIBLE_DEVICES=-1 in front for CPUs"
        )
    index = local_rank or gpu or 0
    torch.accelerator.set_device_index(index)
    torch.set_float32_matmul_precision("high")  # TF32, as in cuDNN's convolutions
    # Shapes stay the same: try all algorithms, then keep the best. MIOpen, of AMD,
    # takes that as its exhaustive search, which can take longer than the training.
    torch.backends.cudnn.benchmark = not torch.version.hip
    # Else MIOpen copies channels_last weights and images to another layout and back.
    os.environ.setdefault("PYTORCH_MIOPEN_SUGGEST_NHWC", "1")
    return torch.device(kind, index)


def pick_dtype(device, wanted=None):
    """Return what autocast shall compute in on this device, or None: in 32 bits.

    wanted: a name of DTYPES. Without it the device decides, and one line says why:
    bfloat16, if it has instructions for that. Else a GPU gets float16, which needs a
    GradScaler (bfloat16 it emulates), and a CPU 32 bits (bfloat16 would be slower).
    """
    from common.log import rank0_print  # not above: bench/check.py needs no tqdm

    if device.type == "cpu":
        # That oneDNN takes it is not enough: with AVX-512 alone it emulates it.
        native = torch.ops.mkldnn._is_mkldnn_bf16_supported()
        if platform.machine() == "x86_64":
            native = native and torch.cpu._is_avx512_bf16_supported()
        unit, other = "CPU", "fp32"
    else:
        module = torch.get_device_module(device)
        native = module.is_bf16_supported(including_emulation=False)
        unit, other = "GPU", "fp16"
    name = wanted or ("bf16" if native else other)
    why = f"this {unit} has {'' if native else 'no '}instructions for bfloat16"
    rank0_print(f"Autocast: {name}, {'as --dtype says' if wanted else 'as ' + why}")
    return DTYPES[name]


if __name__ == "__main__":  # common/env.sh asks how many GPUs there are
    _, count, why = find_gpus()
    if torch.accelerator.current_accelerator() is None:  # and there is a driver
        why = f"PyTorch {torch.__version__} is for CPUs alone: {OTHER}"
    if why:
        print(f"Warning: {why}", file=sys.stderr)
    print(count)
