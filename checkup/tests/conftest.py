"""Helpers: scripts are written to a folder, and run as users run them."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

CHECKUP = Path(__file__).resolve().parent.parent
COMMAND = [sys.executable, "-m", "ddp_checkup"]
# The same on every machine: no launcher around, no GPU, nobody's own settings.
AROUND = "SLURM_", "TORCH", "OMPI_", "PMI_", "MPI_", "MASTER_", "RANK", "LOCAL_"
AROUND += "WORLD_", "GROUP_", "ROLE_", "DDP_CHECKUP", "GLOO_", "NCCL_"
for name in [name for name in os.environ if name.startswith(AROUND)]:
    del os.environ[name]
os.environ |= {"CUDA_VISIBLE_DEVICES": "-1", "ROCR_VISIBLE_DEVICES": "-1"}
os.environ |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(CHECKUP)}


def start(folder, *words, command=COMMAND, **env):
    """Start the checkup in a folder, in a process group of its own."""
    return subprocess.Popen(
        [*map(str, [*command, *words])],
        cwd=folder,
        env=os.environ | env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def finish(folder, process):
    """Wait for its end; return its status, its output and the report's rows."""
    out, err = process.communicate(timeout=200)
    file = folder / "report.json"
    text = file.read_text() if file.exists() else ""
    report = json.loads(text) if text else {"checks": []}
    rows = {row["name"]: row for row in report["checks"]}
    found = [n for n, r in rows.items() if r["state"] in ("error", "warning")]
    return SimpleNamespace(
        status=process.returncode,
        out=out,
        err=err,
        all=f"{out}\n{err}",
        report=report,
        rows=rows,
        found=found,
    )


@pytest.fixture
def write(tmp_path):
    """Return a function that writes a script into the test's folder."""

    def write_script(text, name="script.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
        return name

    return write_script


@pytest.fixture
def checkup(tmp_path):
    """Return a function that runs the checkup with these words."""

    def run(*words, **env):
        return finish(tmp_path, start(tmp_path, *words, **env))

    return run


@pytest.fixture
def check(write, checkup):
    """Return a function that checks the text of a script on two ranks."""

    def run(text, *words, **env):
        return checkup("-n2", "--json=report.json", *words, write(text), **env)

    return run
