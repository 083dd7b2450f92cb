"""A check that torch.compile finds a compiler on this machine."""

import re

import torch

from common.errors import UserError


def require_compiler(device):
    """Raise UserError, with PyTorch's reason in one line, if torch.compile fails.

    Compiles a trivial function for this device. CPUs need a C++ compiler, GPUs need
    Triton and a C compiler (docs.pytorch.org, torch.compiler).
    """
    try:
        # A lambda, as PyTorch 2.9 does not compile its own functions (torch.neg).
        torch.compile(lambda x: -x)(torch.zeros(1, device=device))
    except Exception as error:
        missing = "No working C.. compiler|find C compiler|working triton"
        if not re.search(missing, str(error)):
            raise
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        raise UserError(
            f"torch.compile found no compiler; run `g++ --version`, and load your "
            f"cluster's GCC module if there is none (PyTorch: {lines[0]})"
        ) from None
