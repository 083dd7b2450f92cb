"""beyond_ddp/: calculated memory and messages, and the measured bubble."""

import re
from functools import partial

import conftest
import pytest
import torch
from conftest import REPOSITORY, call, raises_user_error
from run_ranks import Run

PAGE = REPOSITORY / "beyond_ddp/WHAT_FITS.md"
# What the safetensors of https://huggingface.co/meta-llama have.
PUBLISHED = {"1b": 1_235_814_400, "8b": 8_030_261_248, "70b": 70_553_706_496}
load = partial(conftest.load, "beyond_ddp")


def test_measure_bubble(tmp_path):
    options = "--width=16", "--length=8"
    run = Run(tmp_path, "", "beyond_ddp/measure_bubble.py", *options, ranks=2)
    assert run.join() == [0, 0], run.output()
    _, *rows = run.output().splitlines()
    for row, stages in zip(rows, (1, 1, 2), strict=True):
        cells = re.findall(r"m = (\d+): 0\.\d\d \((0\.\d\d)\)", row)
        assert [int(m) for m, _ in cells] == [2, 4, 8, 16]
        for m, calculated in cells:
            bubble = 1 / (stages * int(m) + 1)
            assert float(calculated) == pytest.approx(bubble, abs=0.01)


def test_the_models_have_as_many_parameters_as_published():
    formulas = load("memory_formulas")
    with torch.device("meta"):
        ours = sum(p.numel() for p in load("model").Transformer().parameters())
    for name, published in {**PUBLISHED, "gpt2": ours}.items():
        _, shape = formulas.MODELS[name]
        assert formulas.total_parameters(shape) == published


def test_activations_are_those_of_the_paper():
    """sbh(34 + 5as/h), and sbh(10 + 24/t) with TP, without dropout and 5as/h."""
    formulas = load("memory_formulas")
    shape, sbh = formulas.Shape(1, 8192, 64, 64, 4 * 8192, 256, 1, False), 8192
    for t in (1, 8):
        sums = 4 * (4 + 64 / t)  # in 32 bits, which the paper leaves out
        cut = formulas.block_activations(shape, 1, 2, t) - sums
        assert cut == pytest.approx(sbh * (10 - 2 + 24 / t))
        cut = formulas.block_activations(shape, 1, 2, t, sequence=True) - sums
        assert cut == pytest.approx(sbh * (34 - 2) / t)


def test_the_total_of_a_strategy_is_the_sum_of_its_parts(capsys):
    call(load("what_fits"), "--model", "8b", "--gpus", 8)
    lines = capsys.readouterr().out.replace("fits", "").splitlines()
    rows = {line[:15].strip(): line[15:].split() for line in lines}
    # weights, gradients, Adam: 16 bytes a parameter, of which FSDP has an eighth
    for name, state in ("DDP", [32.1, 32.1, 64.2]), ("FSDP", [4.02, 4.02, 8.03]):
        cells = map(float, rows[name])
        *parts, activations, recomputed, total, total_recomputed, _ = cells
        assert parts[:3] == state
        assert total == pytest.approx(sum(parts) + activations, abs=0.6)
        assert total_recomputed == pytest.approx(sum(parts) + recomputed, abs=0.6)
    with raises_user_error("12 GPUs do not fill nodes of 8; use a multiple"):
        call(load("what_fits"), "--gpus", 12)


def test_the_table_of_the_page_is_that_of_the_script(capsys):
    """The indented block that follows the command."""
    block = r"^python what_fits.py\n```\n((?:\n|    .*\n)+)"
    (shown,) = re.findall(block, PAGE.read_text(), re.M)
    call(load("what_fits"))
    printed = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    shown = [line[4:].rstrip() for line in shown.splitlines()]
    assert [*filter(None, shown)] == [*filter(None, printed)]
