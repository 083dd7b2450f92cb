"""The notebook for Kaggle and Colab runs, and has the commands of its page."""

import json
import os
import sys
from pathlib import Path

import nbformat
import pytest
from conftest import REPOSITORY, run
from test_readmes import blocks, copy  # noqa: F401  (a fixture)

NOTEBOOK = REPOSITORY / "docs/kaggle.ipynb"
SCRIPTS = ["pytorch_dvc_cnn_pretrained", "pytorch_dvc_cnn_pretrained_multigpu"]
SHORTER = {
    "make test-gpu": "make --dry-run test-gpu",  # takes long, and has its own test
    "pip install": "pip show",
    "--epochs 10 --finetune-epochs 2": "--epochs 3 --finetune-epochs 1",
}


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def test_page_and_notebook_have_the_same_commands():
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    page = [commands for _, commands in blocks("docs/KAGGLE.md")]
    assert [cell.source.splitlines() for cell in code_cells(notebook)] == page


def test_the_notebook_is_valid_and_stores_no_outputs():
    notebook = nbformat.read(NOTEBOOK, as_version=nbformat.NO_CONVERT)
    nbformat.validate(notebook)
    for cell in code_cells(notebook):
        assert not cell.outputs and cell.execution_count is None


@pytest.mark.slow
@pytest.mark.usefixtures("copy")
def test_the_notebook_runs_on_cpu_cores(tmp_path):
    """As on Kaggle: the notebook's own Python has PyTorch, and there is no .venv."""
    repository = (tmp_path / "repository").rename(tmp_path / "multigpu")
    (repository / ".venv").unlink()
    text = NOTEBOOK.read_text()
    for long, short in SHORTER.items():
        assert long in text
        text = text.replace(long, short)
    (tmp_path / "kaggle.ipynb").write_text(text)
    command = [sys.executable, "-m", "nbconvert", "--to", "notebook", "--execute"]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = run([*command, "--inplace", "kaggle.ipynb"], tmp_path, PATH=path)
    assert done.returncode == 0, done.stderr
    cells = code_cells(nbformat.read(tmp_path / "kaggle.ipynb", as_version=4))
    output = ["".join(o.get("text", "") for o in cell.outputs) for cell in cells]
    output = [text.replace("\r\n", "\n") for text in output]
    assert "env: SITE=notebook" in output[1] and output[1].endswith(" 0\n")
    assert "test_gpu.py" in output[2] and "install.sh" not in output[2], output[2]
    lines = (repository / "exercise8/logs/results.jsonl").read_text().splitlines()
    assert [json.loads(line)["script"] for line in lines] == SCRIPTS, output[3][
        -2000:
    ]
    table = output[3].partition("speed-up")[2]
    assert all(f"{script} " in table for script in SCRIPTS), output[3][-2000:]
