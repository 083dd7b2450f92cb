"""The ranks and the device of this process, and the device's 16-bit format."""

import os
import sys

import torch

from common.errors import UserError

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": None}


def get_ranks():
    """Return (rank, local_rank, world_size), which torchrun set for this process.

    rank: in the job; local_rank: on this node. Raises UserError without torchrun.
    """
    if "RANK" not in os.environ:
        launch = f"torchrun --standalone --nproc-per-node=2 {sys.argv[0]}"
        raise UserError(f"this needs one process per GPU: run `{launch}`")
    names = "RANK", "LOCAL_RANK", "WORLD_SIZE"
    return tuple(int(os.environ[name]) for name in names)


def get_device(local_rank=None):
    """Return this node's GPU number local_rank, or the CPU if the node has no GPU.

    Scripts for one process pass no local_rank. Raises UserError if such a script was
    started as several, or if there are too few GPUs here.
    """
    if local_rank is None and os.environ.get("WORLD_SIZE", "1") != "1":
        raise UserError(f"one process is enough: run `python {sys.argv[0]}`")
    gpus = torch.accelerator.device_count()
    if gpus == 0:
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
        if os.environ.get("SLURM_GPUS_ON_NODE", "0") != "0" and not hidden:
            raise UserError("PyTorch sees no GPU of this job: run ../tools/check.py")
        return torch.device("cpu")
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if processes > gpus:
        problem = f"{processes} processes, but {gpus} GPU on this node"
        raise UserError(f"{problem}: use --nproc-per-node={gpus}, or more GPUs")
    index = local_rank or 0
    torch.accelerator.set_device_index(index)
    return torch.device(torch.accelerator.current_accelerator().type, index)


def pick_dtype(device, wanted=None):
    """Return the dtype for torch.autocast, or None for 32 bits.

    wanted: a key of DTYPES, or None for the fastest: bfloat16 if the device has
    instructions for it, else float16 on a GPU (with a GradScaler), 32 bits on a CPU.
    """
    if wanted:
        return DTYPES[wanted]
    if device.type == "cpu":
        cpu = getattr(torch.cpu, "get_capabilities", dict)()  # from PyTorch 2.10 on
        bf16 = cpu.get("avx512_bf16") or cpu.get("bf16")  # of x86, of Arm
        return torch.bfloat16 if bf16 else None
    module = torch.get_device_module(device)
    bf16 = module.is_bf16_supported(including_emulation=False)
    return torch.bfloat16 if bf16 else torch.float16
