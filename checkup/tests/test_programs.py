"""Programs as others write them: nothing is said of them, and their bugs are named.

programs/ holds healthy programs in many styles. If the line after a comment `# BUG
name: replacement` is replaced, the program has the bug that this check names.
"""

import os
import re
import shutil
import socket
from pathlib import Path

import pytest
from conftest import CHECKUP, finish, start

PROGRAMS = Path(__file__).parent / "programs"
BUG = re.compile(r"( *)# BUG ([\w -]+): (.*)\n.*")
# An environment with what programs/frameworks/requirements.txt lists.
FRAMEWORKS = os.environ.get("FRAMEWORKS_PYTHON")
FRAMEWORKS = FRAMEWORKS or CHECKUP.parent / ".venv-frameworks/bin/python"
SLOW_ONES = "spawned.py", "frameworks/"


def cases():
    """Yield (program, bug, lines, what replaces them).

    One bug of each program is enough for every day.
    """
    for file in sorted(PROGRAMS.glob("**/*.py")):
        name = str(file.relative_to(PROGRAMS))
        changes = [] if file.name == "engine.py" else [("", "", "")]
        for bug in BUG.finditer(file.read_text()):
            changes.append((bug[2], bug[0], bug[1] + bug[3]))
        for number, change in enumerate(changes):
            slow = number > 1 or name.startswith(SLOW_ONES)
            yield pytest.param(
                name,
                *change,
                id=f"{file.stem}-{number}-{change[0] or 'healthy'}",
                marks=[pytest.mark.slow] * slow,
            )


@pytest.mark.parametrize("name, bug, old, new", [*cases()])
def test_programs(name, bug, old, new, tmp_path):
    command, words = {}, ["-n2", name]
    if name.startswith("frameworks"):
        command = {"command": [FRAMEWORKS, "-m", "ddp_checkup"]}
        if not Path(FRAMEWORKS).exists():
            pytest.skip(
                "no frameworks: run `make venv-frameworks` in the repository"
            )
    shutil.copytree(PROGRAMS, tmp_path, dirs_exist_ok=True)
    (tmp_path / name).write_text((PROGRAMS / name).read_text().replace(old, new))
    env = {"HF_HUB_OFFLINE": "1"}
    if name.startswith("trainer"):
        words = ["-n2", "-m", "trainer.main", "lr=0.1"]
    if name == "spawned.py":
        words = [name]
        with socket.socket() as bound:
            bound.bind(("localhost", 0))
            env["PORT"] = str(bound.getsockname()[1])
    if name in ("local_sgd.py", "sharded.py"):
        words.insert(0, "--hang-timeout=2")
    words.insert(0, "--json=report.json")
    done = finish(tmp_path, start(tmp_path, *words, **command, **env))
    assert {*done.found} == {*bug.split()}, done.all
    states = [row["state"] for row in done.rows.values()]
    assert states and done.status == ("error" in states), done.all
