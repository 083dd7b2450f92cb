"""docs/figures/: the scripts draw the pictures of the READMEs."""

import importlib
import shutil
import sys
from fractions import Fraction

import pytest
from conftest import REPOSITORY, copy_exercise, load, run, slow

TABLES = "all_reduce zero fsdp hsdp tensor_parallel fsdp_tp"


@pytest.mark.parametrize(
    "exercise, script, pictures",
    [
        ("dp_ddp_intro", "draw_tables", TABLES),
        ("dp_ddp_intro", "draw_pipeline", "pipeline"),
        slow("dp_ddp_intro", "draw_data_parallel", "data_parallel"),
        slow("clinic", "draw_checkup", "report"),
    ],
)
def test_a_script_draws_its_pictures(exercise, script, pictures, tmp_path):
    folder = copy_exercise(exercise, tmp_path)
    figures = shutil.copytree(REPOSITORY / "docs/figures", tmp_path / "docs/figures")
    for file in folder.rglob("*.png"):
        file.unlink()
    done = run([sys.executable, figures / f"{script}.py"], "/")
    assert done.returncode == 0 and not done.stderr, done.stderr
    files = {file.stem: file for file in folder.rglob("*.png")}
    assert {*files} == {*pictures.split()}
    for file in files.values():
        assert (REPOSITORY / file.relative_to(tmp_path)).exists()


# GPUs, micro-batches, stages of each GPU.
@pytest.mark.parametrize("p, m, v", [(4, 8, 2), (2, 2, 1), (3, 6, 3)])
def test_schedules_take_the_time_and_memory_of_the_formulas(p, m, v, monkeypatch):
    monkeypatch.syspath_prepend(REPOSITORY / "docs/figures")
    load("dp_ddp_intro", "dp_by_hand")  # not another exercise's model.py
    figure = importlib.import_module("draw_pipeline")
    for name in figure.CHUNKS:
        stages = v if name == "interleaved 1F1B" else 1
        orders = [figure.order_of(gpu, name, p, m, stages) for gpu in range(p)]
        bars = figure.simulate(orders)
        assert len(bars) == 2 * p * m * stages
        seconds = 3 * (m + Fraction(p - 1, stages))
        assert max(end for _, end in bars.values()) == seconds
        share = (p - 1) / (stages * m + p - 1)
        assert float(figure.bubble(orders)) == pytest.approx(share)
        held = [figure.held_activations(order, stages) for order in orders]
        if name == "GPipe":
            assert held == [m] * p
        elif stages == 1:
            assert held == [min(p - gpu, m) for gpu in range(p)]
        else:  # Narayanan et al. 2021: slightly more than 1F1B
            assert held[0] == min(p + Fraction(p - 1, stages), m)
