"""docs/figures/: the pictures in the READMEs are what the scripts draw."""

import importlib
import shutil
import sys
from fractions import Fraction
from unittest.mock import Mock

import pytest
from conftest import REPOSITORY, copy_exercise, load, run
from PIL import Image, ImageChops
from torch.distributed.pipelining import ScheduleInterleaved1F1B

PICTURES = {
    "draw_tables": (
        "all_reduce",
        "zero",
        "fsdp",
        "hsdp",
        "tensor_parallel",
        "fsdp_tp",
    ),
    "draw_pipeline": ("pipeline",),
    "draw_data_parallel": ("data_parallel",),
    "draw_checkup": ("report",),
}
# GPUs, micro-batches, stages of each GPU.
SIZES = [(4, 8, 2), (2, 2, 1), (2, 4, 2), (3, 6, 3), (4, 4, 2), (8, 32, 2)]


@pytest.fixture
def load_figure(monkeypatch):
    monkeypatch.syspath_prepend(REPOSITORY / "docs/figures")
    load("dp_ddp_intro", "dp_by_hand")  # not another exercise's model.py
    return importlib.import_module


@pytest.mark.parametrize(
    "script",
    [
        "draw_tables",
        "draw_pipeline",
        pytest.param("draw_data_parallel", marks=pytest.mark.slow),
        pytest.param("draw_checkup", marks=pytest.mark.slow),
    ],
)
def test_a_script_draws_the_pictures_that_readmes_show(script, tmp_path):
    exercise = "clinic" if script == "draw_checkup" else "dp_ddp_intro"
    folder = copy_exercise(exercise, tmp_path)
    figures = shutil.copytree(REPOSITORY / "docs/figures", tmp_path / "docs/figures")
    for file in folder.rglob("*.png"):
        file.unlink()
    done = run([sys.executable, figures / f"{script}.py"], "/")
    assert done.returncode == 0 and not done.stderr, done.stderr
    files = {file.stem: file for file in folder.rglob("*.png")}
    assert set(files) == set(PICTURES[script])
    for file in files.values():
        shown = Image.open(REPOSITORY / file.relative_to(tmp_path)).convert("RGB")
        drawn = Image.open(file).convert("RGB")
        assert drawn.size == shown.size, file
        # Reduced, so that text moved a little by another Matplotlib does not count.
        difference = ImageChops.difference(drawn.reduce(16), shown.reduce(16))
        assert max(high for _, high in difference.getextrema()) < 48, file


@pytest.mark.parametrize(("p", "m", "v"), SIZES)
def test_schedules_take_the_time_and_memory_of_the_formulas(p, m, v, load_figure):
    figure = load_figure("draw_pipeline")
    for name in figure.CHUNKS:
        stages = v if name == "interleaved 1F1B" else 1
        orders = [figure.order_of(gpu, name, p, m, stages) for gpu in range(p)]
        bars = figure.simulate(orders)
        assert len(bars) == 2 * p * m * stages
        assert max(end for _, end in bars.values()) == 3 * (
            m + Fraction(p - 1, stages)
        )
        share = (p - 1) / (stages * m + p - 1)
        assert float(figure.bubble(orders)) == pytest.approx(share)
        held = [figure.held_activations(order, stages) for order in orders]
        if name == "GPipe":
            assert held == [m] * p
        elif stages == 1:
            assert held == [min(p - gpu, m) for gpu in range(p)]
        else:  # Narayanan et al. 2021: slightly more than 1F1B
            assert held[0] == min(p + Fraction(p - 1, stages), m)


@pytest.mark.parametrize(("p", "m", "v"), [size for size in SIZES if size[2] > 1])
def test_the_interleaved_order_is_pytorchs(p, m, v, load_figure):
    places = {stage: stage % p for stage in range(p * v)}
    common = {"group_size": p, "group_rank": 0, "num_stages": p * v}
    common["stage_index_to_group_rank"] = places
    stages = [Mock(**common, stage_index=p * chunk) for chunk in range(v)]
    order = ScheduleInterleaved1F1B(stages, m, Mock()).pipeline_order
    for gpu in range(p):
        # An action is written 5F2: stage, kind, micro-batch.
        theirs = [str(action) for action in order[gpu] if action is not None]
        ours = load_figure("draw_pipeline").order_of(
            gpu, "interleaved 1F1B", p, m, v
        )
        assert [f"{stage}{kind}{i}" for kind, stage, i in ours] == theirs


def test_steps_of_data_parallel_and_ddp(load_figure):
    figure = load_figure("draw_data_parallel")
    copied = {
        "weights out": 40,
        "logits back": 1,
        "gradients of the weights back": 40,
    }
    bars = figure.data_parallel(3, copied, speed=10)
    assert [start for _, start, _ in bars] == pytest.approx([0, 4, 5, 5.2, 7.2])
    assert [seconds for *_, seconds in bars] == pytest.approx([4, 1, 0.2, 2, 4])
    mb = 2**20
    forward, backward, *buckets = figure.ddp(3, 51 * mb, 100 * mb)
    assert forward[1:] == (0, 1) and backward[1:] == (1, 2)
    assert [seconds for *_, seconds in buckets] == [0.01, 0.25, 0.25]
    assert buckets[-1][1] == 3  # the last bucket follows the backward pass
    *_, last = figure.ddp(3, 51 * mb, 10 * mb)
    assert last[1:] == (pytest.approx(1 + 52 / 51 + 2.5), 2.5)  # the link is busy
