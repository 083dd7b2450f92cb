"""Every check names its bug, and says nothing about a healthy script.

scripts/ holds healthy scripts. A comment `# BUG 1 set-epoch: pass` says that the
next line, replaced by `pass`, has a bug that the check set-epoch reports as an
error, and `set-epoch, seeds warning: pass` one that seeds reports as a warning, too.
All bugs of one number are tried in one run. `# HERE set-epoch` marks the line that
the check names.
"""

import re
import socket
import sys
from pathlib import Path

import pytest
from conftest import start

SCRIPTS = Path(__file__).parent / "scripts"
BUG = re.compile(r"^( *)# BUG (\d) ([\w, -]+): (.*)\n.*?(  # HERE.*)?\n", re.M)


def bugs_of(file):
    """Return {number: {name of a check: the level of its finding}}."""
    bugs = {}
    for _, number, names, *_ in BUG.findall(file.read_text()):
        for name, *level in map(str.split, names.split(",")):
            bugs.setdefault(number, {})[name] = level[0] if level else "error"
    return bugs


CASES = [
    pytest.param(file, number, id=f"{file.stem}-{number}")
    for file in sorted(SCRIPTS.glob("*.py"))
    for number in bugs_of(file)
]


def with_bugs(text, number):
    """Return the script with the bugs of this number, and its other comments."""

    def replace(match):
        indent, own, _, line, here = match.groups()
        line = f"{indent}# BUG\n{indent}{line}{here or ''}\n"
        return line if own == number else match[0]

    return BUG.sub(replace, text)


@pytest.mark.parametrize("file", sorted(SCRIPTS.glob("*.py")), ids=lambda f: f.stem)
def test_healthy_scripts(file, check):
    """Nothing is found, and what a bug is seen by is looked at."""
    done = check(file.read_text())
    assert not done.found and done.status == 0, done.all
    for bugs in bugs_of(file).values():
        assert all(done.rows[name]["state"] == "ok" for name in bugs), done.all


@pytest.mark.parametrize("file, number", CASES)
def test_bugs(file, number, check):
    script, expected = with_bugs(file.read_text(), number), bugs_of(file)[number]
    done = check(script, "--hang-timeout=4")
    found = {name: done.rows[name]["state"] for name in done.found}
    assert found == expected, done.all
    assert done.status == ("error" in expected.values()), done.all
    lines = script.splitlines()
    for name in expected:
        here = [
            i for i, s in enumerate(lines, 1) if re.search(rf"# HERE.* {name}\b", s)
        ]
        assert not here or done.rows[name]["line"] in here, done.all


def test_it_changes_nothing(check, write, tmp_path):
    """A run under it ends with the weights of one without, to the bit."""
    script = (SCRIPTS / "images.py").read_text()
    assert check(script).status == 0
    watched = (tmp_path / "model.pt").read_bytes()
    (tmp_path / "model.pt").unlink()
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        port = bound.getsockname()[1]
    env = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    command = [sys.executable, write(script)]
    ranks = [start(tmp_path, command=command, RANK=str(r), **env) for r in range(2)]
    assert [rank.wait(100) for rank in ranks] == [0, 0]
    assert (tmp_path / "model.pt").read_bytes() == watched
