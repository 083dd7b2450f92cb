"""Whether torch.compile can compile here."""

import re

import torch

from common.cli import UserError


def need_compiler(device):
    """Raise UserError, with PyTorch's reason in one line, if nothing compiles here.

    It compiles the smallest function for this device: on a CPU that takes a C++
    compiler, on a GPU Triton and a C compiler (docs.pytorch.org, torch.compiler).
    """
    try:
        # (PyTorch 2.9 does not compile a function of its own, such as torch.neg.)
        torch.compile(lambda x: -x)(torch.zeros(1, device=device))
    except Exception as error:
        missing = "No working C.. compiler|find C compiler|working triton"
        if not re.search(missing, str(error)):
            raise
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        raise UserError(
            f"torch.compile has no compiler: run `g++ --version`, and load your "
            f"cluster's module of GCC if there is none; PyTorch says: {lines[0]}"
        ) from None
