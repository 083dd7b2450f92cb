"""beyond_ddp/: calculated memory and messages, and the measured bubble."""

import re
from functools import partial

import conftest
import pytest
import torch
from conftest import REPOSITORY, call, raises_user_error
from fork_ranks import Run

HERE = REPOSITORY / "beyond_ddp"
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
    what_fits = load("what_fits")
    for name, published in PUBLISHED.items():
        assert what_fits.total_parameters(what_fits.MODELS[name][1]) == published
    with torch.device("meta"):
        ours = sum(p.numel() for p in load("model").Transformer().parameters())
    assert what_fits.total_parameters(what_fits.MODELS["gpt2"][1]) == ours


def test_sent_bytes():
    """Cases that the table of WHAT_FITS.md does not have."""
    formulas, n, size = load("memory_formulas"), 8, 100
    sent = formulas.sent_bytes
    for name in formulas.STRATEGIES:  # one GPU sends nothing
        assert sent(size, name, 1) == 0 == formulas.sent_activations(size, 4, name)
    # Gathered in 16 bits, FSDP sends no more than DDP; less if the root stays.
    half = sent(size, "FSDP", n, gathered=2)
    assert half == pytest.approx(sent(size, "DDP", n))
    less = sent(size, "FSDP", n, gathered=2, kept=40)
    assert half - less == pytest.approx(2 * 40 * 7 / 8)
    for name in ("TP", "pipeline"):  # nodes of 4: a quarter goes to the other node
        assert sent(size, name, n, 4) == sent(size / 4, "DDP", 2)


def test_the_paper_has_the_same_formulas():
    """sbh(34 + 5as/h), and sbh(10 + 24/t) with TP, without dropout and 5as/h."""
    formulas = load("memory_formulas")
    shape, sbh = formulas.Shape(1, 8192, 64, 64, 4 * 8192, 256, 1, False), 8192
    for t in (1, 8):
        sums = 4 * (4 + 64 / t)  # in 32 bits, which the paper leaves out
        cut = formulas.block_activations(shape, 1, 2, t) - sums
        assert cut == pytest.approx(sbh * (10 - 2 + 24 / t))
        cut = formulas.block_activations(shape, 1, 2, t, sequence=True) - sums
        assert cut == pytest.approx(sbh * (34 - 2) / t)


def test_the_rows_of_a_model(capsys):
    what_fits = load("what_fits")
    call(what_fits, "--model", "8b", "--gpus", 8)
    lines = capsys.readouterr().out.split("One block")[0].splitlines()
    pairs = [re.split(r" {2,}", line, maxsplit=1) for line in lines if "  " in line]
    rows = {pair[0]: pair[1].split() for pair in pairs if len(pair) > 1 and pair[0]}
    # weights, gradients, Adam: 16 bytes a parameter, of which FSDP has an eighth
    assert rows["DDP"][:3] == ["32.1", "32.1", "64.2"]
    assert rows["FSDP"][:3] == ["4.02", "4.02", "8.03"]
    for cells in rows.values():
        parts = [float(cell) for cell in cells[:7]]
        rest = iter(cells[7:])
        for part in parts[5:]:
            total = float(next(rest))
            assert total == pytest.approx(sum(parts[:5]) + part, abs=0.6)
            assert total > 72 or next(rest) == "fits"  # 90 % of 80
        assert len([*rest]) == 1  # what is sent
    with raises_user_error("12 GPUs do not fill nodes of 8; use a multiple"):
        call(what_fits, "--gpus", 12)


def test_the_table_of_the_page_is_that_of_the_script(capsys):
    """The indented block that follows the command."""
    block = r"^python what_fits.py\n```\n((?:\n|    .*\n)+)"
    (shown,) = re.findall(block, (HERE / "WHAT_FITS.md").read_text(), re.M)
    call(load("what_fits"))
    printed = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    shown = [line[4:].rstrip() for line in shown.splitlines()]
    assert [*filter(None, shown)] == [*filter(None, printed)]
