"""The drawings of beyond_ddp can be made and read, and their schedules are true."""

import importlib
import sys
from fractions import Fraction
from itertools import pairwise
from unittest.mock import Mock

import pytest
from conftest import REPOSITORY, copy_room, run
from PIL import Image
from torch.distributed.pipelining import ScheduleInterleaved1F1B

HERE = REPOSITORY / "dp_ddp_intro/beyond_ddp"
DRAWINGS = {
    "draw_shards": ("zero", "fsdp", "hsdp"),
    "draw_tensor_parallel": ("tensor_parallel", "fsdp_tp"),
    "draw_pipeline": ("pipeline",),
}
# GPUs, micro-batches, chunks per GPU.
SIZES = [
    (4, 8, 2),
    (2, 2, 1),
    (2, 4, 2),
    (3, 6, 3),
    (4, 4, 2),
    (2, 8, 4),
    (8, 32, 2),
]


@pytest.fixture
def module(monkeypatch):
    monkeypatch.syspath_prepend(HERE)
    return importlib.import_module


@pytest.mark.parametrize("script", DRAWINGS)
def test_a_script_draws_its_pictures(script, tmp_path):
    folder = copy_room("dp_ddp_intro", tmp_path) / "beyond_ddp"
    for file in (folder / "img").iterdir():
        file.unlink()
    done = run([sys.executable, folder / f"{script}.py"], "/")
    assert done.returncode == 0 and not done.stderr, done.stderr
    drawn = {file.stem for file in (folder / "img").iterdir()}
    assert drawn == {*DRAWINGS[script]}
    for name in drawn:
        before, after = HERE / f"img/{name}.png", folder / f"img/{name}.png"
        assert Image.open(after).size == Image.open(before).size == (1000, 600)
        size = after.stat().st_size
        assert 0.5 < size / before.stat().st_size < 2 and size < 120_000


@pytest.mark.parametrize(
    ("script", "name"),
    [(s, name) for s, names in DRAWINGS.items() for name in names],
)
def test_it_can_be_read_at_the_back(script, name, module):
    """No letters are small, cut off, on others or across the edge of a box."""
    axes = getattr(module(script), name)()
    axes.figure.draw_without_rendering()
    width, height = axes.figure.bbox.size
    boxes = [patch.get_window_extent().extents.tolist() for patch in axes.patches]
    seen = []
    for text in axes.texts:
        if not text.get_text():
            continue
        assert text.get_fontsize() >= 13, text
        left, low, right, top = text.get_window_extent().extents.tolist()
        assert left >= 0 and low >= 0 and right <= width and top <= height, text
        for x0, y0, x1, y1 in seen:
            assert min(right - x0, x1 - left, top - y0, y1 - low) < 1, text
        seen.append((left, low, right, top))
        x, y = (left + right) / 2, (low + top) / 2
        for x0, y0, x1, y1 in boxes:
            if x0 < x < x1 and y0 < y < y1:
                assert x0 <= left + 1 and right - 1 <= x1, text


@pytest.mark.parametrize(("p", "m", "v"), SIZES)
def test_a_schedule_can_be_kept(p, m, v, module):
    schedules = module("draw_pipeline").schedules(p, m, v)
    assert [*schedules] == ["GPipe", "1F1B", "interleaved 1F1B"]
    for bars, chunks in schedules.values():
        ends = {}
        for gpu, start, end, kind, chunk, i in bars:
            assert end - start == Fraction("FB".index(kind) + 1, chunks)
            assert (kind, chunk * p + gpu, i) not in ends  # nothing is done twice
            ends[kind, chunk * p + gpu, i] = end
        assert len(ends) == 2 * p * chunks * m
        for gpu in range(p):  # one thing at a time
            own = sorted(bar[1:3] for bar in bars if bar[0] == gpu)
            for (_, end), (start, _) in pairwise(own):
                assert end <= start
        last = p * chunks - 1
        for gpu, start, _, kind, chunk, i in bars:  # its input is there
            stage = chunk * p + gpu
            if kind == "F" and stage:
                assert ends["F", stage - 1, i] <= start
            if kind == "B":
                assert ends["F", stage, i] <= start
                assert stage == last or ends["B", stage + 1, i] <= start


@pytest.mark.parametrize(("p", "m", "v"), SIZES)
def test_bubbles_and_activations_are_those_of_the_formulas(p, m, v, module):
    drawing = module("draw_pipeline")
    for name, (bars, chunks) in drawing.schedules(p, m, v).items():
        share = (p - 1) / (chunks * m + p - 1)
        assert float(drawing.bubble(bars)) == pytest.approx(share, abs=1e-9)
        most = [drawing.held(bars, gpu, chunks) for gpu in range(p)]
        if name == "GPipe":
            assert most == [m] * p
        elif chunks == 1:
            assert most == [min(p - gpu, m) for gpu in range(p)]
        else:  # Narayanan et al. 2021: somewhat more than 1F1B, for a smaller bubble
            assert most[0] == min(p + Fraction(p - 1, chunks), m)


def test_a_schedule_that_cannot_be_kept(module):
    """GPU 1 begins with what GPU 0 does last, and GPU 0 waits for it."""
    orders = [[("F", 0, 0), ("B", 0, 0), ("F", 0, 1)], [("F", 0, 1), ("F", 0, 0)]]
    with pytest.raises(RuntimeError):
        module("draw_pipeline").simulate(orders)


@pytest.mark.parametrize(("p", "m", "v"), [s for s in SIZES if s[2] > 1])
def test_the_order_is_pytorchs(p, m, v, module):
    stages = [
        Mock(
            group_size=p,
            group_rank=0,
            num_stages=p * v,
            stage_index=p * chunk,
            stage_index_to_group_rank={stage: stage % p for stage in range(p * v)},
        )
        for chunk in range(v)
    ]
    order = ScheduleInterleaved1F1B(stages, m, Mock()).pipeline_order
    for gpu in range(p):
        theirs = [  # an action is written 5F2: stage, kind, micro-batch
            (str(a).lstrip("0123456789")[0], a.stage_index // p, a.microbatch_index)
            for a in order[gpu]
            if a is not None
        ]
        assert theirs == module("draw_pipeline").one_f_one_b(gpu, p, m, v)
