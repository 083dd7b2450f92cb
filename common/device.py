"""The rank and the device of this process, and the fastest dtype there."""

import os
import platform
import sys
import warnings

import torch

from common import watchdog
from common.cli import UserError

if torch.__version__ < "2.10":  # compared as versions are
    raise UserError(
        f"PyTorch {torch.__version__} is too old: this needs 2.10 or later, see "
        "docs/CLUSTER.md#which-pytorch"
    )
# PyTorch 2.14 warns of each view that FSDP returns. No script changes one in place.
warnings.filterwarnings("ignore", "FSDP2-wrapped module")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": None}


def get_ranks():
    """Return (rank, local_rank, world_size), which torchrun set for this process.

    rank numbers the processes of the job, local_rank those of this node. Raises
    UserError if torchrun did not start this process.
    """
    watchdog.heartbeat(120)
    if "RANK" not in os.environ:
        launcher = "python -m common.torchrun --standalone --nproc-per-node=2"
        what = f"{sys.argv[0]} needs one process per GPU"
        raise UserError(f"{what}: run `{launcher} {sys.argv[0]}`")
    names = "RANK", "LOCAL_RANK", "WORLD_SIZE"
    return tuple(int(os.environ[name]) for name in names)


def count_gpus():
    """Return the number of GPUs that PyTorch can use here."""
    device = torch.accelerator.current_accelerator(check_available=True)
    # Apple's GPU does not count: DDP has no backend for it.
    if device is None or device.type == "mps":
        return 0
    return torch.accelerator.device_count()


def get_device(local_rank=None):
    """Return this node's GPU number local_rank, or the CPU if the node has no GPU.

    Scripts for one process pass no local_rank. Raises UserError if such a script was
    started as several processes, if there are more processes than GPUs on this node,
    or if Slurm granted GPUs but PyTorch sees none.
    """
    watchdog.heartbeat(120)
    rank, world_size = (os.environ.get(name) for name in ("RANK", "WORLD_SIZE"))
    several = rank not in (None, "0") or world_size not in (None, "1")
    if local_rank is None and several:
        raise UserError(
            f"{sys.argv[0]} is for one process, but RANK={rank} and WORLD_SIZE="
            f"{world_size}: start its multi-GPU counterpart, or run `unset RANK "
            f"WORLD_SIZE` and `python {sys.argv[0]}`"
        )
    gpus = count_gpus()
    if not gpus:
        names = [f"{kind}_VISIBLE_DEVICES" for kind in ("CUDA", "HIP", "ROCR")]
        hidden = any(os.environ.get(name) in ("", "-1") for name in names)
        given = os.environ.get("SLURM_GPUS_ON_NODE", "0")
        if given != "0" and not hidden:
            raise UserError(
                f"PyTorch {torch.__version__} sees none of this job's {given} GPUs: "
                "start ../bench/check.py in the same way, which says why, or run "
                "`export CUDA_VISIBLE_DEVICES=-1` to use CPUs"
            )
        return torch.device("cpu")
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if processes > gpus:
        raise UserError(
            f"{processes} processes, but {gpus} GPU on this node: use "
            f"--nproc-per-node={gpus}, or CUDA_VISIBLE_DEVICES=-1 in front for CPUs"
        )
    index = local_rank or 0
    torch.accelerator.set_device_index(index)
    torch.set_float32_matmul_precision("high")  # TF32, as in cuDNN's convolutions
    # Shapes never change: try all algorithms once, and keep the fastest. AMD's
    # MIOpen would search exhaustively, which can take longer than the training.
    torch.backends.cudnn.benchmark = not torch.version.hip
    # Otherwise MIOpen copies channels_last tensors to another layout and back.
    os.environ.setdefault("PYTORCH_MIOPEN_SUGGEST_NHWC", "1")
    return torch.device(torch.accelerator.current_accelerator().type, index)


def pick_dtype(device, wanted=None):
    """Return autocast's dtype on this device, or None for 32 bits; print the choice.

    wanted: a key of DTYPES, or None for the fastest: bfloat16 if the device has
    instructions for it. Otherwise a GPU, which would emulate bfloat16, gets float16
    (with a GradScaler), and a CPU, where bfloat16 would be slower, 32 bits.
    """
    from common.log import rank0_print  # here: bench/check.py must run without tqdm

    if device.type == "cpu":
        # oneDNN also accepts bfloat16 where it emulates it, with AVX-512 alone.
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


if __name__ == "__main__":  # for common/env.sh
    print(count_gpus())
