"""A user's mistake ends a script with one line and exit status 2."""

import os
import sys
import time


class UserError(Exception):
    """A user's mistake, in one line: what is wrong, and what to do."""


def run(main):
    """Call main(). If it raises a UserError, print it and exit with status 2."""
    try:
        main()
    except UserError as error:
        if os.environ.get("RANK", "0") != "0":
            time.sleep(15)  # rank 0 says the same, and torchrun ends this one
        print(f"Error: {error}", file=sys.stderr, flush=True)
        sys.exit(2)
    finally:  # Gloo's threads free their tensors, or they abort Python's exit:
        time.sleep(0.1)  # https://github.com/pytorch/pytorch/pull/179291
