"""The notebook for Kaggle and Colab runs, and has the commands of its page."""

import os
import sys
from pathlib import Path

import nbformat
import pytest
from conftest import REPOSITORY, copy_checkout, run
from test_readmes import blocks

NOTEBOOK = REPOSITORY / "docs/kaggle.ipynb"
SHORTER = {
    "make test-gpu": "make --dry-run test-gpu",  # takes long, and has its own test
    "pip install": "pip show",
    "--epochs 10 --finetune-epochs 2": "--epochs 3 --finetune-epochs 1",
}


def code_cells(file):
    notebook = nbformat.read(file, nbformat.NO_CONVERT)
    nbformat.validate(notebook)
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def test_it_has_the_commands_of_its_page_and_no_outputs():
    cells = code_cells(NOTEBOOK)
    page = [commands for _, commands in blocks("docs/KAGGLE.md")]
    assert [cell.source.splitlines() for cell in cells] == page
    assert not any(cell.outputs or cell.execution_count for cell in cells)


@pytest.mark.slow
def test_it_runs_on_cpu_cores(tmp_path):
    """As on Kaggle: the notebook's own Python has PyTorch, and there is no .venv."""
    (copy_checkout(tmp_path / "multigpu") / ".venv").unlink()
    text = NOTEBOOK.read_text()
    for long, short in SHORTER.items():
        assert long in text
        text = text.replace(long, short)
    (tmp_path / "kaggle.ipynb").write_text(text)
    command = f"{sys.executable} -m nbconvert --execute --inplace kaggle.ipynb"
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = run(command.split(), tmp_path, timeout=600, PATH=path)
    assert done.returncode == 0, done.stderr
    cells = code_cells(tmp_path / "kaggle.ipynb")
    output = ["".join(o.get("text", "") for o in cell.outputs) for cell in cells]
    assert "env: SITE=notebook" in output[1] and output[1].strip().endswith(" 0")
    assert "gpu/run.sh" in output[3] and "install.sh" not in output[3], output[3]
    assert "pretrained_multigpu " in output[2].partition("speed-up")[2], output[2]
