"""Functions of modules that a script may import later, or never.

They are wrapped when the process group, a DataLoader or an optimizer is made.
"""

from ddp_checkup.hooks.wrapping import rebind, wrap_if_imported

LATE = []  # (module, function, how it is wrapped)


def wrap_when_imported(module, function, **hooks):
    """Wrap a function of a module as soon as the script has imported it."""
    LATE.append((module, function, hooks))


def wrap_imported():
    """Wrap what has been imported by now, also where the script keeps its name."""
    wrapped = [
        wrap_if_imported(module, name, **hooks) for module, name, hooks in LATE
    ]
    if any(wrapped):
        rebind()
