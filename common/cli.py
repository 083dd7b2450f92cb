"""How a run ends when something is wrong: one clear message, and an exit status."""

import argparse
import atexit
import gc
import os
import re
import sys
import threading
import time

# Of others' errors: words (a regular expression), what is wrong and what to do.
KNOWN = {
    "/dev/shm/nccl": "no shared memory is left for NCCL: start the container with "
    "--shm-size=1g, or type `export NCCL_SHM_DISABLE=1`",
    "no kernel image": "PyTorch has no code for this GPU: type `TORCH=cu126 make "
    "venv`, or see docs/CLUSTER.md#which-pytorch",
    "</torch_|shared memory": "no shared memory is left: type --workers 0",
    "No space left|quota exceeded": "the disk is full: make room",
    "out of memory|t allocate memory": "out of memory: type a smaller --batch-size",
    "more than 1 value per channel": "BatchNorm needs a last batch of more than one "
    "image: type another --batch-size",
}


class UserError(Exception):
    """A user's mistake, in one line: what is wrong, what to type next."""

    def __init__(self, text):
        super().__init__(" ".join(text.splitlines()))  # others' errors may have more


def report(kind, error, trace):
    """As sys.excepthook: of several processes, let the one that failed speak.

    A user's mistake is mostly the same for all ranks: rank 0 tells it, and torchrun
    ends the others while they wait. So it does with those that have lost a peer.
    """
    rank, text = os.environ.get("RANK"), str(error)  # None: there is one process
    if getattr(error, "name", "") in ("tensorboard", "matplotlib", "tqdm"):
        kind, text = UserError, f"no {error.name}: `source common/env.sh` tells more"
    for words, what in KNOWN.items():
        # Of a worker that was killed, the cause says why.
        if kind is not UserError and re.search(words, f"{text} {error.__cause__}"):
            kind, text = UserError, f"{what} ({text.splitlines()[0]})"
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT"):
        value, least = os.environ.get(name, "1"), 0 if "RANK" in name else 1
        usual = value.isdigit() and least <= int(value) < 65536
        if kind is ValueError and not usual:
            kind, text = UserError, f"{name}={value} is odd: type `unset {name}`"
    lost = "peer" in text or "NCCL" in text
    if lost or (kind is UserError and rank not in (None, "0")):
        time.sleep(5)
    if kind.__module__.startswith("wandb."):  # no key, or no network
        kind, text = UserError, text.splitlines()[0].split(". ")[0]
        text += ": type `python -m wandb login`, or `export WANDB_MODE=offline`"
    if rank:  # else Gloo's threads may abort it on its way out
        atexit.register(os._exit, 2 if kind is UserError else 1)
    if kind is KeyboardInterrupt:  # torchrun says it for its ranks
        return rank or print("\nStopped by Ctrl-C", file=sys.__stderr__)
    if kind is not UserError:
        return sys.__excepthook__(kind, error, trace)
    # A loader's worker wraps its error in a traceback: the line is at the end. And
    # torch.distributed holds sys.stderr back until this returns: it does not.
    text = text.split("UserError: ")[-1].strip()
    print(f"Error: {text}\n", end="", file=sys.__stderr__)  # in one piece
    sys.exit(2)


def leave():
    """End Gloo's threads before Python ends: else they may abort it, or hang.

    They get a turn to free their last tensors, since Python waits for them while it
    frees the process group, and gives none. Seen with torch 2.8 and 2.15.
    """
    if "RANK" in os.environ:
        time.sleep(0.1)
    gc.collect()


sys.excepthook = report
# TensorBoard's thread raises a full disk's error in the main one, too.
threading.excepthook = lambda of: (
    "No space left" in str(of.exc_value) or threading.__excepthook__(of)
)
atexit.register(leave)


class OptionParser(argparse.ArgumentParser):
    """An ArgumentParser whose --help is the script's docstring, with kind errors."""

    def __init__(self, doc):
        formatter = argparse.RawDescriptionHelpFormatter
        super().__init__(description=doc, formatter_class=formatter)

    def format_help(self):
        for action in self._actions:
            unsaid = "default" not in action.help
            if unsaid and action.default not in (None, argparse.SUPPRESS):
                action.help += " (default: %(default)s)"
        return super().format_help()

    def parse_args(self):
        options = super().parse_args()
        for name, value in vars(options).items():
            if isinstance(value, (int, float)) and not 0 <= value < 2**31:  # or nan
                name = name.replace("_", "-")
                self.error(f"--{name} {value} is not from 0 to 2147483647")
        return options

    def error(self, message):
        raise UserError(f"{message}; --help lists the options")


def at_least(least):
    """Return a type for options: whole numbers from this one on."""

    def whole_number(text):
        if int(text) < least:
            raise argparse.ArgumentTypeError(f"{text} is less than {least}")
        return int(text)

    return whole_number


def add_line(file, text):
    """Append a line to a file: all of it or, with a UserError, nothing."""
    line = f"{text}\n".encode()
    with open(file, "ab", buffering=0) as out:
        start, written = out.tell(), out.write(line)
        if written < len(line):
            if os.fstat(out.fileno()).st_size == start + written:  # nobody else's
                out.truncate(start)
            raise UserError(f"no room for the result in {file}")
