"""dp_ddp_intro/beyond_ddp/: what each way promises, with real processes."""

import functools
import sys
from functools import partial

import conftest
import pytest
import torch
from conftest import REPOSITORY, copy_room, run, torchrun

INTRO, SPY = REPOSITORY / "dp_ddp_intro", REPOSITORY / "tests/spy_beyond.py"
SMALL = ("--layers", 4, "--width", 32, "--heads", 4, "--length", 16)
GLOBAL = 32  # sequences: one batch is all the data, in any order
TWENTY = (*SMALL, "--sequences", GLOBAL, "--epochs", 20)  # a step each
WAYS = {  # script: processes, options
    "single": (1, ()),
    "ddp": (2, ()),
    "accumulate": (2, ("--batch-size", 4, "--accumulate", 4)),
    "zero": (2, ()),
    "checkpointing": (2, ()),
    "fsdp": (2, ()),
    "hsdp": (4, ()),  # two launchers play two nodes
    "tensor_parallel": (2, ()),
    "fsdp_tp": (4, ()),
    "pipeline": (2, ("--schedule", "1F1B")),
    "pipeline GPipe": (2, ("--schedule", "GPipe")),
    "pipeline Interleaved1F1B": (2, ("--schedule", "Interleaved1F1B")),
}
QUICK = {"ddp", "fsdp", "tensor_parallel", "pipeline"}
each_way = pytest.mark.parametrize(
    "way",
    [
        pytest.param(way, marks=() if way in QUICK else pytest.mark.slow)
        for way in WAYS
        if way != "single"
    ],
)


@pytest.fixture
def room(tmp_path):
    return copy_room("dp_ddp_intro", tmp_path)


load = partial(conftest.load, "dp_ddp_intro/beyond_ddp")


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """Run a way once, as users do but for the spy; give what each rank saw."""

    @functools.cache
    def spied(way):
        room = copy_room("dp_ddp_intro", tmp_path_factory.mktemp("way"))
        name, (ranks, options) = way.split()[0], WAYS[way]
        script = next(room.glob(f"**/{name}.py"))
        command = [SPY, script, "--batch-size", GLOBAL // ranks, *TWENTY, *options]
        if way == "hsdp":
            launch = ["bash", "jobscript_ddp_2nodes.sh", *command]
            done = run(launch, room, GPUS=str(ranks // 2))
        elif ranks == 1:
            done = run([sys.executable, *command], room)
        else:
            done = torchrun(ranks, command, room)
        assert done.returncode == 0, done.stderr
        return [torch.load(room / f"{rank}.pt") for rank in range(ranks)]

    return spied


@each_way
def test_the_losses_of_20_steps_are_those_of_one_process(way, seen):
    """To 1e-4, in 32 bits: with SGD, and with Adam."""
    (alone,), ranks = seen("single"), seen(way)
    losses = alone["losses"]
    assert len(losses) == 40
    assert losses[19] < losses[0] - 0.5 and losses[39] < losses[20] - 0.5
    for rank in ranks:
        assert rank["losses"] == pytest.approx(losses, rel=0, abs=1e-4)


@each_way
def test_each_rank_holds_its_part(way, seen):
    """Bytes, counted by each rank: of parameters, gradients, optimizer state."""
    (alone,), ranks = seen("single"), seen(way)
    names = "parameters", "gradients", "state"
    whole = [alone[name] for name in names]
    assert whole[0] == whole[1] == whole[2] / 2 > 200_000
    held = [[rank[name] for name in names] for rank in ranks]
    # What TP cuts: of four blocks the weights, and the biases of columns.
    blocks = 4 * 4 * (12 * 32 * 32 + 7 * 32)  # bytes
    if way in ("fsdp", "hsdp"):  # hsdp: a half within each node
        assert held == [[part / 2 for part in whole]] * len(ranks)
    elif way == "zero":
        assert [rank[:2] for rank in held] == [whole[:2]] * 2
        assert sum(rank[2] for rank in held) == whole[2]
        for rank in held:
            assert rank[2] == pytest.approx(whole[2] / 2, rel=0.05)
    elif "pipeline" in way:
        assert [sum(parts) for parts in zip(*held, strict=True)] == whole
        assert max(rank[0] for rank in held) < 0.6 * whole[0]
    elif way in ("tensor_parallel", "fsdp_tp"):
        rest = whole[0] - blocks  # what all have whole: embedding, norms, head
        data = 2 if way == "fsdp_tp" else 1  # which FSDP splits once more
        part = (blocks / 2 + rest) / data
        assert held == [[part, part, 2 * part]] * len(ranks)
    else:
        assert held == [whole] * len(ranks)


@pytest.mark.slow
def test_the_copies_of_hsdp_are_equal(seen):
    """To the bit, after training: each half of the model, on both nodes."""
    halves = [rank["weights"] for rank in seen("hsdp")]
    for one, other in (halves[::2], halves[1::2]):
        assert len(one) > 50
        assert all(map(torch.equal, one, other))
    assert not all(map(torch.equal, *halves[:2]))
