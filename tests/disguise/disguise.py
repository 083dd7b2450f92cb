"""Loaded with PyTorch: it counts a GPU, unless a variable hides it."""

import os


def pretend():
    import torch

    hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "0") in ("", "-1")
    count, gpu = 0 if hidden else 1, torch.accelerator

    def current_accelerator(check_available=False):
        return torch.device("cuda") if count or not check_available else None

    gpu.current_accelerator = current_accelerator
    gpu.device_count = torch.cuda.device_count = lambda: count
    gpu.is_available = torch.cuda.is_available = lambda: count > 0
    torch.cuda.get_device_capability = lambda index=None: (9, 0)
