"""make venv: the PyTorch that it chooses. (.ci/run installs one in earnest.)"""

import os
import re
import shutil

import pytest
from conftest import REPOSITORY, fails, path_without_sbatch, run

# Instead of python3, pip and uv: notes what it is told. With -c, all is well.
FAKE = """#!/bin/sh
[ "$1" != -c ] || exit 0
echo "$@" >> "$TOLD"
if [ "$2" = venv ]; then mkdir -p .venv/bin; cp "$0" .venv/bin/pip; exit $STATUS; fi
"""


@pytest.fixture
def make_venv(tmp_path):
    """Return a function: make venv in a copy, its output, and what it told uv."""
    checkout, commands = tmp_path / "a clone, à côté", tmp_path / "bin"
    shutil.copytree(REPOSITORY / "common", checkout / "common")
    for file in ("Makefile", "install.sh"):
        shutil.copy(REPOSITORY / file, checkout)
    for folder in ("", "cinic_lab", "docs/site"):
        (checkout / folder).mkdir(parents=True, exist_ok=True)
        (checkout / folder / "requirements.txt").touch()
    path = path_without_sbatch(commands)
    for name in ("python3", "uv"):
        (commands / name).unlink(missing_ok=True)
        (commands / name).write_text(FAKE)
        (commands / name).chmod(0o755)

    def make(site="", status=0, **env):
        (checkout / "common/sites/venv.sh").write_text(site)
        told = tmp_path / "told"
        told.write_text("")
        env |= {"PATH": path, "TOLD": str(told), "STATUS": str(status)}
        # Of a `make test PYTHON=...` around this test:
        env |= {"MAKEFLAGS": "", "PYTHON": "python3"}
        done = run(["make", "venv"], checkout, **env)
        assert (done.returncode == 0) == (status == 0), done.stdout + done.stderr
        return done.stdout + told.read_text()

    make.checkout, make.commands = checkout, commands
    return make


def index(output):
    """Return [the name of PyTorch's index] that uv was told, or []."""
    return re.findall(r"torch torchvision --index-url \S+/whl/(\w+)\n", output)


def test_it_installs_again_only_for_another_pytorch(make_venv):
    output = make_venv()
    assert index(output) == ["cpu"] and "No GPU and no Slurm here" in output
    assert "--requirement=cinic_lab/requirements.txt" in output
    assert "Nothing to be done" in make_venv()
    output = make_venv(TORCH="cu126")
    assert index(output) == ["cu126"]
    assert "uninstall --yes torch torchvision" in output  # or pip would keep it
    os.utime(make_venv.checkout / ".venv/installed", (0, 0))  # older than the list
    assert index(make_venv()) == ["cu126"]


@pytest.mark.parametrize(
    "site, slurm, expected",
    [
        ("has_driver() { true; }", False, []),  # PyPI's, for NVIDIA's newest GPUs
        ("", True, []),  # a login node, whose jobs have GPUs
        ("TORCH=cu126", True, ["cu126"]),
        ("exit 1", False, ["cpu"]),  # as a site's file without SBATCH_ACCOUNT
    ],
)
def test_it_chooses_a_pytorch_for_the_machine(site, slurm, expected, make_venv):
    if slurm:
        (make_venv.commands / "sbatch").symlink_to("/bin/true")
    assert index(make_venv(site)) == expected


def test_a_failed_environment_leaves_nothing(make_venv):
    """As on Ubuntu without python3-venv."""
    make_venv(status=1)
    assert not (make_venv.checkout / ".venv").exists()


def test_a_copy_without_symbolic_links(tmp_path):
    """As with git's core.symlinks=false: install.sh is the first that runs."""
    (tmp_path / "exercise8").mkdir()
    (tmp_path / "exercise8/common").write_text("../common")
    done = run(["bash", REPOSITORY / "install.sh", "python3"], tmp_path)
    fails(done, "lost its symbolic links", "git config core.symlinks true")
    assert not (tmp_path / ".venv").exists()
