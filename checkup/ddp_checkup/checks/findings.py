"""The form of a check: a function of all traces that returns a Finding or None."""

from collections import namedtuple

CHECKS = []  # in the order of the report


class NotSeen(Exception):
    """Raised by a check that cannot decide; its text says why."""


class Finding(namedtuple("Finding", "line text level fix", defaults=[None, None])):
    """A bug, and its line; level and fix replace those of the check."""


def worst(findings):
    """Return the first error, else the first warning, or None without findings."""
    errors = [finding for finding in findings if finding.level != "warning"]
    return next(iter([*errors, *findings]), None)


class Check(namedtuple("Check", "name promise fix level function")):
    """A row of the report; its function's docstring says what it looks at."""


def check(name, promise, fix, level="error"):
    """Add a function to CHECKS.

    promise: what holds if nothing is found. level: error (wrong numbers, hangs, lost
    files) or warning (likely a mistake).
    """

    def add(function):
        CHECKS.append(Check(name, promise, fix, level, function))
        return function

    return add
