"""A stranger installs it: the commands of README.md, and what they print."""

import re
import shutil
import subprocess
import sys
import sysconfig
import textwrap

import pytest
from conftest import CHECKUP, finish, start


@pytest.mark.slow
def test_a_stranger_installs_it(tmp_path):
    """In an environment that has its requirements; the folder may be anywhere."""
    ignored = shutil.ignore_patterns("tests", "build", "__pycache__")
    folder = shutil.copytree(CHECKUP, tmp_path / "copy", ignore=ignored)
    venv = [sys.executable, "-m", "venv", "--without-pip", tmp_path / "env"]
    subprocess.run(venv, check=True)
    (site,) = (tmp_path / "env").glob("lib/python*/site-packages")
    (site / "pytorch.pth").write_text(sysconfig.get_path("purelib"))
    python, clean = tmp_path / "env/bin/python", {"PYTHONPATH": ""}
    install = [python, "-m", "pip", "install", "."]
    done = finish(folder, start(folder, command=install, **clean))
    assert done.status == 0, done.all
    command = [tmp_path / "env/bin/ddp-checkup", "-n", "2", "example.py"]
    done = finish(folder, start(folder, command=command, **clean))
    assert done.status == 1 and "Traceback" not in done.err, done.all
    quoted = re.search(
        "    Checkup of .*?\n\n", (folder / "README.md").read_text(), re.S
    )
    assert textwrap.dedent(quoted[0]).strip() in done.out, done.out
    # pytest finds the fixture by itself.
    (tmp_path / "test_it.py").write_text("def test(checkup): checkup('gone.py')")
    pytest_there = [python, "-m", "pytest", "test_it.py"]
    done = finish(tmp_path, start(tmp_path, command=pytest_there, **clean))
    assert "no script gone.py" in done.out, done.all
