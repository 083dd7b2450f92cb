"""Which process this is, and which device is its own."""

import os
import sys

import torch

from common.cli import UserError


def get_ranks():
    """Return (rank, local_rank, world_size), as torchrun gave them to this process.

    rank counts the processes of the job, local_rank those of this node. Raises
    UserError if torchrun did not start this process.
    """
    try:
        names = "RANK", "LOCAL_RANK", "WORLD_SIZE"
        return tuple(int(os.environ[name]) for name in names)
    except KeyError:
        raise UserError(
            f"{sys.argv[0]} wants one process per GPU: type `python -m "
            f"common.torchrun --standalone --nproc-per-node=2 {sys.argv[0]}`"
        ) from None


def get_device(local_rank=None, gpu=None):
    """Return this node's GPU of that number, or the CPU if the node has no GPU.

    A script for one process gives no local_rank; it may name a gpu. Raises UserError
    if it was started as several, if there are more processes than GPUs on this node,
    or if there is no such GPU.
    """
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if local_rank is None and int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise UserError(
            f"{sys.argv[0]} is for one process: type `python {sys.argv[0]}`, or "
            "start its multi-GPU twin"
        )
    # Apple's GPU is left out: there is one of it, and DDP has no backend for it.
    kind = torch.accelerator.current_accelerator()
    gpus = torch.accelerator.device_count()
    if gpu is not None and gpu >= gpus:
        raise UserError(
            f"no GPU {gpu} here: there are {gpus}, and the first is number 0"
        )
    if kind is None or not torch.accelerator.is_available() or kind.type == "mps":
        return torch.device("cpu")
    if processes > gpus:
        raise UserError(
            f"{processes} processes, but {gpus} GPU on this node: type "
            f"--nproc-per-node={gpus}, or CUDA_VISIBLE_DEVICES= in front to use CPUs"
        )
    index = local_rank or gpu or 0
    torch.accelerator.set_device_index(index)
    torch.set_float32_matmul_precision("high")  # TF32, as in cuDNN's convolutions
    torch.backends.cudnn.benchmark = True  # shapes stay the same: try, then keep
    return torch.device(kind.type, index)
