"""Wraps functions that a script calls, without changing what they do."""

import functools
import sys
from types import FunctionType

import torch

from ddp_checkup.trace import HERE, is_library, trace

WRAPPERS = {}  # by the id of the function that they wrap
# Frames of these files lie between a hook and its caller, those of the second file
# only under torch.compile.
HOOK_FILES = HERE, "/torch/_dynamo/eval_frame.py"


def call(hook, *args):
    """Call a hook; keep_out_of_graphs() replaces this function."""
    return hook(*args)


def keep_out_of_graphs():
    """Keep all hooks out of what torch.compile compiles."""
    global call
    call = torch.compiler.disable(call)


def wrap(owner, name, before=None, after=None, during=""):
    """Wrap a function between before(name, values) and after(result, values).

    values: the function's positional arguments, then those by name. during: the
    field of the trace that holds the name meanwhile: "waiting", "calling" or
    "switching".
    """
    original = getattr(owner, name)

    @functools.wraps(original)
    def wrapper(*args, **kwargs):
        if torch.compiler.is_compiling():  # hooks are no part of a graph
            return original(*args, **kwargs)
        trace.activity += 1
        values = [*args, *kwargs.values()]
        if before:
            call(before, name, values)
        old = during and getattr(trace, during)
        if during:
            setattr(trace, during, name)
        try:
            result = original(*args, **kwargs)
        finally:
            if during:
                setattr(trace, during, old)
            trace.activity += 1
        if after:
            call(after, result, values)
        return result

    # torch.jit.script has to compile the original: the wrapper has other globals.
    wrapper.__prepare_scriptable__ = lambda: original
    WRAPPERS[id(original)] = wrapper
    setattr(owner, name, wrapper)


def wrap_if_imported(module, name, **hooks):
    """Wrap a function of a module that the script may have imported by now."""
    owner, (*parts, name) = sys.modules.get(module), name.split(".")
    for part in parts:
        owner = getattr(owner, part, None)
    function = getattr(owner, name, None)
    if owner is None or function is None:
        return False
    if id(getattr(function, "__wrapped__", None)) in WRAPPERS:
        return False
    wrap(owner, name, **hooks)
    return True


def rebind():
    """Replace unwrapped functions that the user's modules have imported."""
    for module in [*sys.modules.values()]:
        if is_library(getattr(module, "__file__", None) or "<"):
            continue
        # The functions of a spawned process's main module have globals of their own.
        functions = [v for v in vars(module).values() if isinstance(v, FunctionType)]
        for names in [vars(module), *(f.__globals__ for f in functions)]:
            for name, value in [*names.items()]:
                while id(value) in WRAPPERS:  # some are wrapped twice
                    value = names[name] = WRAPPERS[id(value)]


def number_in(things, thing):
    """Return the place of an object in a list, to which it is added if it is new."""
    for number, other in enumerate(things):
        if other is thing:
            return number
    things.append(thing)
    return len(things) - 1


def file_of_caller():
    """Return the file of the code that called the function with this hook."""
    frame = sys._getframe(1)
    while any(file in frame.f_code.co_filename for file in HOOK_FILES):
        frame = frame.f_back
    return frame.f_code.co_filename
