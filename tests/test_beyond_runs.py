"""dp_ddp_intro/beyond_ddp/: checkpoints, schedules, 16 bits, and what is said."""

import importlib
import operator
import re
import shutil
from functools import partial
from itertools import chain

import conftest
import pytest
import torch
from conftest import REPOSITORY, call, copy_room, mistake, run, torchrun
from test_errors import fails
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

HERE, SPY = REPOSITORY / "dp_ddp_intro/beyond_ddp", REPOSITORY / "tests/spy_runs.py"
TINY = ["--layers=2", "--width=32", "--heads=4", "--length=16", "--lr=0.003"]
TINY += ["--sequences=64", "--batch-size=8"]
CHECKPOINT = "beyond_ddp/fsdp_checkpoint.py"
load = partial(conftest.load, "dp_ddp_intro/beyond_ddp")


@pytest.fixture(scope="module")
def room(tmp_path_factory):
    return copy_room("dp_ddp_intro", tmp_path_factory.mktemp("beyond"))


def submit(room, *command, ranks=2, **env):
    """Type bash jobscript_ddp.sh ..."""
    command = ["bash", "jobscript_ddp.sh", *command]
    return run(command, room, GPUS=str(ranks), **env)


def spied(room, *command, ranks=2, **env):
    """The same with the spy; return what each rank did, in each script."""
    done = submit(room, SPY, *command, ranks=ranks, **env)
    assert done.returncode == 0, done.stderr
    return [torch.load(room / f"{rank}.pt") for rank in range(ranks)]


def whole(checkpoint, tmp_path):
    """Read a checkpoint without processes, all shards together."""
    dcp_to_torch_save(checkpoint, tmp_path / "whole.pt")
    return torch.load(tmp_path / "whole.pt", weights_only=False)["run"]


def leaves(tree, *path):
    """Give {path: what is there} of dicts in dicts."""
    if not isinstance(tree, dict):
        return {path: tree}
    parts = (leaves(value, *path, key) for key, value in tree.items())
    return dict(chain(*(part.items() for part in parts)))


def same(one, two):
    """Two checkpoints are equal to the bit."""
    one, two = leaves(one), leaves(two)
    assert {*one} == {*two} and len(one) > 100
    for path, value in one.items():
        equal = torch.equal if torch.is_tensor(value) else operator.eq
        assert equal(value, two[path]), path


@pytest.fixture(scope="module")
def saved(room):
    """Train for 3 epochs; return the losses and the checkpoints."""
    (ran,), _ = spied(room, CHECKPOINT, *TINY, "--epochs=3")
    (folder,) = room.glob("logs/fsdp_checkpoint-*")
    return ran["losses"], [folder / f"epoch{i}" for i in (1, 2, 3)]


def test_each_epoch_is_saved_and_one_goes_on_as_if_never_stopped(
    saved, room, tmp_path
):
    losses, epochs = saved
    assert len(losses) == 3 and losses[2] < losses[0]
    for i, folder in enumerate(epochs, start=1):
        files = {file.name for file in folder.iterdir()}
        assert files == {"__0_0.distcp", "__1_0.distcp", ".metadata"}
        assert whole(folder, tmp_path)["epoch"] == i
    there = {*room.glob("logs/fsdp_checkpoint-*")}
    options = [*TINY, "--epochs=3", f"--resume={epochs[0]}"]
    (ran,), _ = spied(room, CHECKPOINT, *options)
    assert ran["losses"] == losses[1:]  # to all digits
    (folder,) = {*room.glob("logs/fsdp_checkpoint-*")} - there
    assert {file.name for file in folder.glob("epoch*")} == {"epoch2", "epoch3"}
    same(whole(folder / "epoch3", tmp_path), whole(epochs[2], tmp_path))


@pytest.mark.parametrize("ranks", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_saved_on_2_loaded_on(ranks, saved, room, tmp_path):
    """The weights and Adam's moments, to the bit; then it trains."""
    losses, (_, second, _) = saved
    options = [*TINY, "--epochs=3", f"--resume={second}"]
    ran = spied(room, CHECKPOINT, *options, ranks=ranks)
    was = whole(second, tmp_path)
    moments = [state["exp_avg"] for state in was["optimizer"]["state"].values()]
    assert all(moment.any() for moment in moments)
    assert {*was["optimizer"]["state"]} == {*was["model"]}
    same(whole(room / f"loaded{ranks}", tmp_path), was)
    for (rank,) in ran:
        assert len(rank["losses"]) == 1 and rank["losses"][0] < losses[1]


@pytest.mark.slow
def test_a_run_that_is_killed_while_it_saves(room):
    """The checkpoint before is whole; who names the half one is told of it."""
    before = {*room.glob("logs/fsdp_checkpoint-*")}
    command = SPY, CHECKPOINT, *TINY, "--epochs=3"
    done = submit(room, *command, KILL="epoch2")
    assert done.returncode == 137 and "rank 0 was ended by SIGKILL" in done.stderr
    (folder,) = {*room.glob("logs/fsdp_checkpoint-*")} - before
    assert (folder / "epoch1/.metadata").is_file()
    half = {file.name for file in (folder / "epoch2").iterdir()}
    assert half == {"__0_0.distcp", "__1_0.distcp"}
    named = folder.relative_to(room)
    fails_to_resume(room, named / "epoch2", f"--resume {named / 'epoch1'}\n")


def fails_to_resume(room, folder, *words, options=()):
    done = submit(room, CHECKPOINT, *TINY, *options, f"--resume={folder}")
    done.stdout = ""  # it has said what it is about
    fails(done, str(folder), *words)


@pytest.mark.slow
def test_a_checkpoint_that_does_not_fit(saved, room):
    _, (first, *_, last) = saved
    fails_to_resume(room, first, "type the options", options=["--width=64"])
    fails_to_resume(room, last, "--epochs 4", options=["--epochs=3"])


def test_no_checkpoint_there(tmp_path, monkeypatch):
    """Of those that are whole the newest is named, if there is one."""
    monkeypatch.chdir(tmp_path)
    reading = load("shards").reading
    with mistake("^no whole checkpoint in none: leave out --resume$"):
        reading("none", 1, None).__enter__()
    for name in ("a/epoch2", "b/epoch1", "c/epoch3"):
        (tmp_path / "logs" / name).mkdir(parents=True)
        if name[0] != "c":
            (tmp_path / "logs" / name / ".metadata").touch()
    for name in ("none", "logs/c/epoch3"):
        with mistake(
            f"^no whole checkpoint in {name}: type --resume logs/b/epoch1$"
        ):
            reading(name, 1, None).__enter__()


@pytest.mark.slow
def test_a_pipeline_does_what_is_drawn(room, monkeypatch):
    """On 4 GPUs: in which order each computes, and how much it holds at once."""
    monkeypatch.syspath_prepend(HERE)
    drawing = importlib.import_module("draw_pipeline")
    p, m = drawing.GPUS, drawing.MICRO_BATCHES
    options = [*TINY, "--layers=8", "--epochs=1", f"--micro-batches={m}"]
    options += ["--sequences=32"]  # a step
    names = {"GPipe": "GPipe", "1F1B": "1F1B", "Interleaved1F1B": "interleaved 1F1B"}
    command = []
    for name in names:
        command += ["/", "beyond_ddp/pipeline.py", *options, f"--schedule={name}"]
    ranks = spied(room, *command[1:], ranks=p)
    drawn = drawing.schedules()
    for i, name in enumerate(names):
        bars, v = drawn[names[name]]
        for gpu, did in enumerate(rank[i] for rank in ranks):
            own = sorted(bar for bar in bars if bar[0] == gpu)
            todo = [(kind, chunk * p + gpu, n) for *_, kind, chunk, n in own]
            assert did["order"] == todo and len(todo) == 2 * m * v, name
            assert did["held"] == v * drawing.held(bars, gpu, v), name
    assert [rank[0]["held"] for rank in ranks] == [m] * p  # GPipe: all
    assert [rank[1]["held"] for rank in ranks] == [*range(p, 0, -1)]  # 1F1B: p


@pytest.mark.parametrize(
    "script, ranks, options, words",
    [
        ("tensor_parallel", 2, ["--heads=1"], "1 heads, but 2 GPUs: type --heads 2"),
        ("tensor_parallel", 4, ["--heads=6"], "--heads 4"),
        ("fsdp_tp", 2, ["--tensor=3"], "2 GPUs, 4 heads by 3: type --tensor 1"),
        ("fsdp_tp", 4, ["--heads=1"], "4 GPUs, 1 heads by 2: type --tensor 1"),
        ("pipeline", 4, [], "4 stages .*--layers 4"),
        ("pipeline", 2, ["--schedule=Interleaved1F1B"], "4 stages .*--layers 4"),
        ("pipeline", 2, ["--micro-batches=3"], "16 .* 3 .*: type --batch-size 3"),
        ("pipeline", 2, ["--sequences=70"], "have 6 .* not 16: type --sequences 80"),
        ("pipeline", 2, ["--micro-batches=1"], "--micro-batches 2, or .* GPipe"),
        (
            "pipeline",
            2,
            ["--schedule=Interleaved1F1B", "--layers=4", "--micro-batches=1"],
            "2 GPUs in turns: type --micro-batches 2",
        ),
    ],
)
def test_mistakes(script, ranks, options, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda: None)
    names = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": ranks}
    for name, value in names.items():
        monkeypatch.setenv(name, str(value))
    with mistake(words):
        call(load(script), *TINY, *options)
    assert not (tmp_path / "logs").exists()


def test_a_mistake_ends_all_processes_with_a_line(room):
    """What only pipeline.py can tell once its processes are connected."""
    before = {*room.glob("logs/pipeline-*")}
    done = submit(room, "beyond_ddp/pipeline.py", *TINY, "--sequences=70")
    fails(done, "not 16: type --sequences 80")
    assert {*room.glob("logs/pipeline-*")} == before


@pytest.mark.slow
def test_in_16_bits_it_learns_and_half_the_bytes_are_gathered(room):
    command = ["beyond_ddp/fsdp.py", *TINY, "--epochs=3", "--sequences=256"]
    for full, half in spied(room, *command, "/", *command, "--bf16"):
        losses = half["losses"]
        assert losses[2] < losses[0] - 0.5
        assert losses == pytest.approx(full["losses"], rel=0.02)
        assert losses != full["losses"]
        assert len(half["gathered"]) > 50
        assert [2 * size for size in half["gathered"]] == full["gathered"]


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("g++"), reason="no compiler: load one")
def test_compiled_it_has_the_losses_of_ddp(room, tmp_path):
    options = [*TINY, "--layers=1", "--epochs=3"]
    command = ["ddp.py", *options, "/", "beyond_ddp/compiled.py", *options]
    ranks = spied(room, *command, TORCHINDUCTOR_CACHE_DIR=str(tmp_path))
    for plain, compiled in ranks:
        assert compiled["losses"] == pytest.approx(plain["losses"], rel=0, abs=1e-4)
        assert compiled["losses"][2] < compiled["losses"][0]
        assert plain["graphs"] == 0 and compiled["graphs"] >= 2  # one is the check's


def test_without_a_compiler_one_line_says_so(room, tmp_path):
    (tmp_path / "bin").mkdir()
    env = {"PATH": str(tmp_path / "bin"), "CXX": "/nonexistent/g++"}
    env |= {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "CUDA_VISIBLE_DEVICES": "-1"}
    done = torchrun(2, ["beyond_ddp/compiled.py", *TINY], room, **env)
    assert done.returncode == 2, done.stderr
    said = done.stderr.splitlines()  # this machine may be slow
    (line,) = (line for line in said if not line.startswith("no step for "))
    assert line.startswith("Error: torch.compile has no compiler: type `g++ --ver")


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_what_is_counted_is_what_is_calculated(ranks, room):
    done = submit(room, "beyond_ddp/measure_memory.py", ranks=ranks)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    title, _, _, *rows = done.stdout.splitlines()
    assert title.startswith(f"{ranks} ranks, 4 layers of width 128")
    readme = (HERE / "README.md").read_text()
    for row in done.stdout.splitlines():
        assert f"\n    {row.rstrip()}\n" in readme
    ways = dict.fromkeys(row.split()[0] for row in rows)
    assert len(ways) == len(rows) == 9 and {"ddp", "zero", "fsdp", "pipeline"} <= {
        *ways
    }
    for row in rows:
        figures = [float(word) for word in row.split()[1:]]
        assert len(figures) == 10 and min(figures) > 0.1, row
        assert figures[::2] == pytest.approx(figures[1::2], rel=0.02), row


def test_the_last_of_a_group_sends_and_steps(monkeypatch):
    """10 batches in groups of 4: the first one of an epoch is smaller."""
    module, sent, steps = load("accumulate"), [], []
    monkeypatch.setattr(module.dist, "all_reduce", lambda sums: None)
    model = load("model").Transformer(1, 16, 2, 8)
    model.steps, model.every = 10, 4
    model.register_forward_pre_hook(
        lambda *_: sent.append(model.require_backward_grad_sync)
    )
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    optimizer.register_step_post_hook(lambda *_: steps.append(len(sent)))
    data = load("dataset").random_sequences(4, 8)
    batches = [data.__getitems__([0, 1])] * 10
    module.train(model, batches, optimizer, torch.device("cpu"))
    assert steps == [2, 6, 10]
    assert [number for number, sends in enumerate(sent, 1) if sends] == steps
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.slow
def test_measure_bubble(room):
    tiny = ["--batch-size=16", "--width=16", "--length=8", "--steps=3"]
    done = submit(room, "beyond_ddp/measure_bubble.py", *tiny)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    title, *rows = done.stdout.splitlines()
    assert title.startswith("2 GPUs")
    for row, stages in zip(rows, (1, 1, 2), strict=True):
        cells = re.findall(r"m = (\d+): (0\.\d\d) \((0\.\d\d)\)", row)
        assert [int(m) for m, _, _ in cells] == [2, 4, 8, 16]
        for m, measured, calculated in cells:
            assert float(calculated) == pytest.approx(
                1 / (stages * int(m) + 1), abs=0.01
            )
            assert 0 < float(measured) < 1  # how long, depends on the machine
