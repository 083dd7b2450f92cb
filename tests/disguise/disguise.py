"""Loaded with PyTorch: it counts DISGUISE GPUs, unless a variable hides them."""

import os


def pretend():
    import torch

    hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "0") in ("", "-1")
    count = 0 if hidden else int(os.environ["DISGUISE"])
    device = torch.device("cuda")
    gpu = torch.accelerator
    gpu.current_accelerator = lambda check_available=False: (
        device if count or not check_available else None
    )
    gpu.device_count = torch.cuda.device_count = lambda: count
    gpu.is_available = torch.cuda.is_available = lambda: count > 0
    torch.cuda.get_device_capability = lambda index=None: (9, 0)
