"""The form of a check, and its verdicts: found(...), unseen(...) or OK."""

from collections import namedtuple

Verdict = namedtuple("Verdict", "state text level fix", defaults=["", None, None])
OK = Verdict("ok")


class Check(namedtuple("Check", "name level promise seen fix function")):
    """A row of the report; call it with the ranks' records."""

    def __call__(self, ranks):
        return self.function(ranks)


def check(promise, seen, fix, level="error"):
    """Make a Check of a function; set_epoch() becomes `set-epoch`.

    seen: how the checkup sees it. level: error (wrong numbers, hangs, lost files),
    warning (likely a mistake) or advice (slow or untidy).
    """

    def make(function):
        name = function.__name__.replace("_", "-")
        return Check(name, level, promise, seen, fix, function)

    return make


def found(text, level=None, fix=None):
    """level, fix: others than the check's."""
    return Verdict("found", text, level, fix)


def unseen(why):
    return Verdict("not seen", why)
