"""Options, one-line errors and exit statuses."""

import argparse
import atexit
import gc
import os
import re
import sys
import time

# A regular expression for the text of an error: what is wrong, and what to do.
HINTS = {
    "No module named '(numpy|PIL|torch|torchvision)'": "this Python has no PyTorch: "
    "run `source common/env.sh`",
    "no kernel image": "PyTorch has no code for this GPU: run `TORCH=cu126 make "
    "venv`, or see docs/CLUSTER.md#which-pytorch",
    "/dev/shm/nccl": "no shared memory is left for NCCL: start the container with "
    "--shm-size=1g, or run `export NCCL_SHM_DISABLE=1`",
    "</torch_|shared memory": "no shared memory is left: use --workers 0",
    "No space left|quota exceeded": "the disk is full: make room",
    "out of memory|t allocate memory": "out of memory: use a smaller --batch-size",
    "Unable to find address for": "this machine has no network interface of that "
    "name: run `unset GLOO_SOCKET_IFNAME`",
    "No API key": "W&B has no key: run `python -m wandb login`, or `export "
    "WANDB_MODE=offline`",
    "more than 1 value per channel": "BatchNorm needs a last batch of more than one "
    "image: use another --batch-size",
}


class UserError(Exception):
    """A user's mistake, in one line: what is wrong, what to do."""

    def __init__(self, text):
        super().__init__(" ".join(text.splitlines()))  # it may quote a longer error


def excepthook(kind, error, trace):
    """Print one line for a user's mistake, and exit with status 2.

    All ranks usually make the same mistake: rank 0 prints it, and torchrun ends the
    others while they wait. So do ranks that have lost a peer.
    """
    rank, text = os.environ.get("RANK"), str(error)
    if kind is not UserError:
        for words, hint in HINTS.items():
            # If a loader's worker was killed, the cause says why.
            if re.search(words, f"{text} {error.__cause__}"):
                kind, text = UserError, f"{hint} ({text.splitlines()[0]})"
                break
    if rank:
        lost_peer = "peer" in text or "NCCL" in text
        if lost_peer or (kind is UserError and rank != "0"):
            time.sleep(10)
        # Otherwise Gloo's threads may abort the process while it exits.
        atexit.register(os._exit, 2 if kind is UserError else 1)
    if kind is UserError:
        # A loader's worker wraps its error in a traceback that ends with our line.
        text = text.split("UserError: ")[-1].strip()
        # torch.distributed buffers sys.stderr until this returns: it never does.
        print(f"Error: {text}\n", end="", file=sys.__stderr__)
        sys.exit(2)
    if kind is not KeyboardInterrupt:
        sys.__excepthook__(kind, error, trace)
    elif not rank:  # torchrun prints this for its ranks
        print("\nStopped by Ctrl-C", file=sys.__stderr__)


def drain_gloo():
    """Let Gloo's threads free their tensors, or they may abort Python's exit."""
    if "RANK" in os.environ:
        time.sleep(0.1)
    gc.collect()


sys.excepthook = excepthook
atexit.register(drain_gloo)


class OptionParser(argparse.ArgumentParser):
    """An ArgumentParser whose --help is the script's docstring."""

    def __init__(self, doc):
        formatter = argparse.RawDescriptionHelpFormatter
        super().__init__(description=doc, formatter_class=formatter)

    def format_help(self):
        for action in self._actions:
            takes_value = action.default is not None and action.nargs != 0
            if takes_value and "default" not in action.help:
                action.help += " (default: %(default)s)"
        return super().format_help()

    def error(self, message):
        raise UserError(f"{message}; --help lists the options")


def at_least(least):
    """Return a type for options: numbers of the type of `least`, at least that."""

    def number(text):
        value = type(least)(text)
        if not least <= value < 2**31:  # also refuses NaN
            what = f"{text} is not from {least} to 2**31 - 1"
            raise argparse.ArgumentTypeError(what)
        return value

    return number


def split_evenly(batch_size, world_size):
    """Return the batch size per GPU; raise UserError if it is not whole."""
    if batch_size % world_size:
        raise UserError(
            f"a batch of {batch_size} cannot be split over {world_size} GPUs; "
            f"use --batch-size {-(-batch_size // world_size) * world_size}"
        )
    return batch_size // world_size


def check_appendable(file):
    """Create the folder of a file; raise UserError if append_line() would fail."""
    folder = os.path.dirname(file)
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot write {folder}/: {error.strerror}") from None
    old = os.path.isfile(file) and os.access(file, os.W_OK)
    new = not os.path.lexists(file) and os.access(folder, os.W_OK)
    if not (old or new):
        raise UserError(f"cannot write {file}: move it away, or make it writable")


def append_line(file, text):
    """Append a whole line to a file, or raise UserError if the disk is full."""
    line = f"{text}\n".encode()
    with open(file, "ab+", buffering=0) as out:
        start = out.seek(0, os.SEEK_END)
        if start and os.pread(out.fileno(), 1, start - 1) != b"\n":
            line = b"\n" + line  # an editor has removed the last newline
        if out.write(line) < len(line):
            out.truncate(start)
            raise UserError(f"no room for the result in {file}")
