"""What the checkup sees of a script, without changing it.

install() wraps the functions of PyTorch that a DDP script calls. Each hook notes
something in `record` or `state`; its module's reset() says what. None of them waits
for a device: checksums stay there until the script has ended.
"""

import sys
import warnings

from ddp_checkup import record
from ddp_checkup.hooks import (
    collectives,
    files,
    loaders,
    losses,
    modules,
    numbers,
    steps,
    variables,
)

# The wrapper that is installed last runs first: variables look at the last loop.
MODULES = (
    collectives,
    losses,
    loaders,
    steps,
    modules,
    numbers,
    files,
    variables,
)


def reset():
    """Start with empty records: in a new process, and when it is forked."""
    for module in (record, *MODULES):
        module.reset()


def install():
    for module in MODULES:
        module.install()
    original = warnings.showwarning

    def show(message, category, file, line, *others):
        frame = next(record.user_frames(sys._getframe(1)), None)
        if file.startswith(record.HERE) and frame:  # it is about a hook's caller
            file, line = frame.f_code.co_filename, frame.f_lineno
        original(message, category, file, line, *others)

    warnings.showwarning = show
