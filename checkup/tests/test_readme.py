"""README.md lists the checks as they are in the code."""

import importlib
import inspect
import re

from conftest import CHECKUP

ROW = re.compile(r"^\| `([\w-]+)` \| (\w+) \| (.*) \| (.*) \| (.*) \|$", re.M)


def test_the_table_of_checks(monkeypatch):
    monkeypatch.syspath_prepend(CHECKUP)
    checks = importlib.import_module("ddp_checkup.checks").CHECKS
    text = (CHECKUP / "README.md").read_text()
    section = re.search("^## What it checks$(.*?)^## ", text, re.M | re.S)[1]
    rows = ROW.findall(section.partition("\n\nIn a framework")[0])
    assert rows == [
        (c.name, c.level, c.promise, inspect.getdoc(c.function), c.fix)
        for c in checks
    ]


def test_each_check_has_its_worth():
    """Both tables name the same checks."""
    text = (CHECKUP / "README.md").read_text()
    listed = [row[0] for row in ROW.findall(text.partition("In a framework")[0])]
    worth = text.partition("## What each check is worth")[2].partition("## What")[0]
    assert sorted(re.findall(r"^\| `([\w-]+)` \|", worth, re.M)) == sorted(listed)
