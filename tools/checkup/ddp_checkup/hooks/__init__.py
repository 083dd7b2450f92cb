"""What the checkup sees of a script, without changing it.

install() wraps the functions of PyTorch that a DDP script calls. Each hook notes
something in `record` or `state`; its module's reset() says what. None of them waits
for a device: checksums stay there until the script has ended.
"""

from ddp_checkup import record
from ddp_checkup.hooks import collectives, loaders, output, steps

MODULES = collectives, loaders, steps, output


def reset():
    """Start with empty records: in a new process, and when it is forked."""
    for module in (record, *MODULES):
        module.reset()


def install():
    for module in MODULES:
        module.install()
