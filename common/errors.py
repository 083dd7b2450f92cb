"""A user's mistake ends a script with one line and exit status 2."""

import argparse
import errno
import os
import signal
import sys
import textwrap
import time
from contextlib import contextmanager


class UserError(Exception):
    """A user's mistake, in one line: what is wrong, and what to do."""


@contextmanager
def explain(problem, fix):
    """Turn each error of this block into a UserError: problem, its reason, and fix.

    For files and servers, which fail in too many ways to list. A UserError and the
    file errors that run() prints in one line pass unchanged.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, (UserError, MemoryError)) or is_file_error(error):
            raise
        reason = textwrap.shorten(f"{type(error).__name__}: {error}", 100)
        raise UserError(f"{problem} ({reason}): {fix}") from None


def positive(text):
    """Return a whole number from 1 on, as type= of an argparse option."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is too small: use 1 or more")
    return number


def is_file_error(error):
    """Return whether a file cannot be used, or a disk is full.

    False for the errors of sockets, processes and servers, and for a missing file,
    which is often a bug.
    """
    if isinstance(error, RuntimeError) and "unexpected pos" in str(error):
        return True  # torch.save() on a full disk
    if not isinstance(error, OSError) or error.errno in (None, errno.ENOENT):
        return False
    return error.filename is not None or error.errno in (errno.ENOSPC, errno.EDQUOT)


def run(main):
    """Call main(). A UserError, or a file that cannot be used, ends it in one line.

    The exit status is then 2. All other errors are raised. Ctrl-C ends the script
    without a traceback, and all of torchrun's ranks at once: one that waits for
    another in C++ would not see a KeyboardInterrupt.
    """
    # Not dist.is_torchelastic_launched(): TensorFlow's scripts have no PyTorch.
    if "TORCHELASTIC_RUN_ID" in os.environ:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        main()
    except (UserError, OSError, RuntimeError) as error:
        if not isinstance(error, UserError):
            if not is_file_error(error):
                raise
            error = f"{error}: use another file, folder or disk"
        sys.stderr.write(f"Error: {error}\n")  # one write: lines of ranks do not mix
        sys.exit(2)
    except KeyboardInterrupt:
        print("Stopped", file=sys.stderr, flush=True)
        sys.exit(128 + signal.SIGINT)
    finally:
        # Gloo's threads may abort if Python ends before they free their tensors:
        # https://github.com/pytorch/pytorch/pull/179291. With torch 2.14, 9 of 26
        # runs did so where the system ran these threads last; with the sleep, none.
        time.sleep(0.1)
