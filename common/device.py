"""The ranks and the device of this process, and the device's 16-bit format."""

import os
import shlex
import sys

import torch
import torch.distributed as dist

from common.errors import UserError

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": None}


def get_ranks():
    """Return (rank, local_rank, world_size), which torchrun set for this process.

    rank: its number in the whole job; local_rank: its number on this node. Raises
    UserError if torchrun did not start this process.
    """
    names = "RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"
    if not all(name in os.environ for name in names):
        launch = f"torchrun --standalone --nproc-per-node=2 {shlex.join(sys.argv)}"
        raise UserError(
            f"this needs one process per GPU: run `{launch}`, or the run script "
            "that the script's first lines name"
        )
    return tuple(int(os.environ[name]) for name in names[:3])


def get_device(local_rank=None):
    """Make GPU local_rank of this node the current one; return it, or the CPU.

    Scripts for one process pass no local_rank. Raises UserError if torchrun started
    several processes of such a script, or if this node has more processes than GPUs
    and NCCL_MULTI_RANK_GPU_ENABLE=1, which lets them share GPUs, is not set.
    """
    if local_rank is None and dist.is_torchelastic_launched():
        world_size = os.environ["WORLD_SIZE"]
        if world_size != "1":
            raise UserError(
                "this script uses one process, but torchrun started "
                f"{world_size}: run `python {shlex.join(sys.argv)}`. (A DDP script "
                "calls get_device(local_rank).)"
            )
    gpus = torch.accelerator.device_count()
    if gpus == 0:
        return torch.device("cpu")
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    # NCCL 2.30 and later, which PyTorch 2.14 brings, let processes share a GPU:
    # https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html
    if processes > gpus and os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") != "1":
        raise UserError(
            f"{processes} processes, but {gpus} GPU on this node: use "
            f"--nproc-per-node={gpus}, or let them share it: "
            "`export NCCL_MULTI_RANK_GPU_ENABLE=1` (docs/ONE_GPU.md); in a job ask "
            f"for --gpus-per-node={processes}, not --gpus-per-task"
        )
    index = (local_rank or 0) % gpus
    torch.accelerator.set_device_index(index)
    return torch.device(torch.accelerator.current_accelerator().type, index)


def pick_dtype(device, wanted=None):
    """Return the dtype for torch.autocast, or None for 32 bits.

    wanted: a key of DTYPES, or None for the fastest format. That is bfloat16 if the
    device has instructions for it, else float16 on a GPU (which needs a GradScaler)
    and 32 bits on a CPU.
    """
    if wanted:
        return DTYPES[wanted]
    if device.type == "cpu":
        cpu = getattr(torch.cpu, "get_capabilities", dict)()  # from PyTorch 2.10 on
        bf16 = cpu.get("avx512_bf16") or cpu.get("bf16")  # on x86, on Arm
        return torch.bfloat16 if bf16 else None
    module = torch.get_device_module(device)
    bf16 = module.is_bf16_supported(including_emulation=False)
    return torch.bfloat16 if bf16 else torch.float16
