"""A user's mistake ends a script with one line and exit status 2."""

import errno
import signal
import sys
import textwrap
import time
from contextlib import contextmanager

import torch.distributed as dist


class UserError(Exception):
    """A user's mistake, in one line: what is wrong, and what to do."""


@contextmanager
def loading(file, kind):
    """Turn each error of this block into a UserError: the file is not of this kind.

    Damaged files raise errors of many types.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        reason = textwrap.shorten(f"{type(error).__name__}: {error}", 100)
        fix = "use another file, or make it again"
        raise UserError(f"{file} is not {kind} ({reason}): {fix}") from None


def is_file_error(error):
    """Return whether an OSError is about a file that cannot be used, or a full disk.

    Sockets' and processes' errors name no file. A missing file is often a bug.
    """
    if isinstance(error, FileNotFoundError):
        return False
    return error.filename is not None or error.errno in (errno.ENOSPC, errno.EDQUOT)


def run(main):
    """Call main(). A UserError, or a file that cannot be used, ends it in one line.

    The exit status is then 2. All other errors are raised. Ctrl-C ends the script
    without a traceback, and all of torchrun's ranks at once: one that waits for
    another in C++ would not see a KeyboardInterrupt.
    """
    if dist.is_torchelastic_launched():
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        main()
    except (UserError, OSError) as error:
        if isinstance(error, OSError):
            if not is_file_error(error):
                raise
            error = f"{error}: use another file, folder or disk"
        print(f"Error: {error}", file=sys.stderr, flush=True)
        sys.exit(2)
    except KeyboardInterrupt:
        print("Stopped", file=sys.stderr, flush=True)
        sys.exit(128 + signal.SIGINT)
    finally:  # Gloo's threads free their tensors, or they abort Python's exit:
        time.sleep(0.1)  # https://github.com/pytorch/pytorch/pull/179291
