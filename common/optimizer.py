"""What PyTorch's fused SGD needs before the first step in 16 bits."""

import torch


def init_momentum(optimizer):
    """Set each parameter's momentum to zero before the first step.

    Fused SGD allocates it, uninitialised, in a step that GradScaler may skip.
    """
    for group in optimizer.param_groups:
        for p in group["params"]:
            optimizer.state[p]["momentum_buffer"] = torch.zeros_like(p)
