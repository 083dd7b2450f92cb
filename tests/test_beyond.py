"""beyond_ddp/: checkpoints, schedules, torch.compile, memory, messages.

test_ddp.py tests that each script trains as one process does.
"""

import importlib
import math
import re
import resource
import shutil
from collections import Counter
from contextlib import nullcontext
from functools import partial

import conftest
import numpy as np
import pytest
import torch
from conftest import REPOSITORY, call, raises_user_error
from fork_ranks import Run
from record_rank import record
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.nn.functional import (
    cross_entropy,
    one_hot,
)
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.utils.data import DataLoader, DistributedSampler

HERE = REPOSITORY / "beyond_ddp"
TINY = ("--layers=2", "--width=32", "--heads=4", "--length=16", "--lr=0.3")
TINY += ("--sequences=48",)
load = partial(conftest.load, "beyond_ddp")


def start(folder, script, *options, ranks=2, patch=record, **env):
    """Run a script of the folder on batches of 12 sequences."""
    batch = f"--batch-size={12 // max(1, ranks)}"
    script = f"beyond_ddp/{script}.py"
    command = folder, "", script, *TINY, batch, *options
    return Run(*command, ranks=ranks, patch=patch, **env)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Train for 3 epochs; return the records of all ranks, and the checkpoints."""
    folder = tmp_path_factory.mktemp("saved")
    ranks = start(folder, "fsdp_checkpoint", "--epochs=3").results()
    (logs,) = folder.glob("logs/fsdp_checkpoint-*")
    return ranks, [logs / f"epoch{i}" for i in (1, 2, 3)]


def test_each_epoch_is_saved_and_a_resumed_run_has_the_same_losses(saved, tmp_path):
    ranks, epochs = saved
    for folder in epochs:
        files = {file.name for file in folder.iterdir()}
        assert files == {"__0_0.distcp", "__1_0.distcp", ".metadata"}
    options = "--epochs=3", f"--resume={epochs[0]}"
    again = start(tmp_path, "fsdp_checkpoint", *options).results()
    for rank, other in zip(ranks, again, strict=True):
        assert other["means"] == rank["means"][1:]  # to all digits
        assert all(map(torch.equal, other["weights"], rank["weights"]))
    (folder,) = tmp_path.glob("logs/fsdp_checkpoint-*")
    assert {file.name for file in folder.glob("epoch*")} == {"epoch2", "epoch3"}


@pytest.mark.parametrize("ranks", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_saved_on_2_loaded_on(ranks, saved, tmp_path):
    """Without weights or momentum the loss would differ."""
    (first, _), (_, second, _) = saved
    options = "--epochs=3", f"--resume={second}"
    again = start(tmp_path, "fsdp_checkpoint", *options, ranks=ranks).results()
    for rank in again:
        (mean,) = rank["means"]
        assert mean == pytest.approx(first["means"][2], rel=1e-4)


@pytest.mark.slow
def test_a_checkpoint_that_does_not_fit(saved, tmp_path):
    _, (first, second, last) = saved
    for options, words in (
        (["--width=64", f"--resume={first}"], "use the options of its run"),
        (["--epochs=3", f"--resume={last}"], "has 3 epochs; use --epochs 4"),
    ):
        run = start(tmp_path, "fsdp_checkpoint", *options)
        assert run.join() == [2, 2], run.output()
        (line,) = re.findall("^Error: .*", run.output(), re.M)
        assert words in line and str(options[-1].partition("=")[2]) in line


def test_no_complete_checkpoint(tmp_path, monkeypatch):
    """The message names the newest complete one, if there is one."""
    monkeypatch.chdir(tmp_path)
    open_checkpoint = load("dcp_checkpoint").open_checkpoint
    with raises_user_error("^no complete checkpoint in none; leave out --resume$"):
        open_checkpoint("none", 1, None).__enter__()
    for name in ("a/epoch2", "b/epoch1", "c/epoch3"):
        (tmp_path / "logs" / name).mkdir(parents=True)
        if name[0] != "c":
            (tmp_path / "logs" / name / ".metadata").touch()
    for name in ("none", "logs/c/epoch3"):
        why = f"^no complete checkpoint in {name}; use --resume logs/b/epoch1$"
        with raises_user_error(why):
            open_checkpoint(name, 1, None).__enter__()


def note_chunks(module, rank):
    """Make main() save the order of passes, and the most micro-batches held at once.

    The order is a list of (kind, stage, micro-batch).
    """
    order, kept, held, main = [], Counter(), [], module.main

    class Kept:
        """What autograd keeps for the backward pass of a micro-batch."""

        def __init__(self, tensor):
            self.tensor, self.chunk = tensor.detach(), order[-1]
            kept[self.chunk] += 1

        def __del__(self):
            kept[self.chunk] -= 1

    def noting(kind, function):
        hooks = torch.autograd.graph.saved_tensors_hooks

        def chunk(stage, number, *args, **kwargs):
            order.append((kind, stage.stage_index, number))
            keeps = hooks(Kept, lambda k: k.tensor) if kind == "F" else nullcontext()
            with keeps:
                result = function(stage, number, *args, **kwargs)
            held.append(sum(map(bool, kept.values())))
            return result

        return chunk

    def noting_main():
        main()
        torch.save((order, max(held)), f"{rank}.pt")

    for kind, name in (("F", "forward_one_chunk"), ("B", "backward_one_chunk")):
        setattr(PipelineStage, name, noting(kind, getattr(PipelineStage, name)))
    module.main = noting_main


@pytest.mark.parametrize(
    "schedule, name",
    [
        ("GPipe", "GPipe"),
        ("1F1B", "1F1B"),
        ("Interleaved1F1B", "interleaved 1F1B"),
    ],
)
def test_a_pipeline_runs_as_drawn(schedule, name, tmp_path, monkeypatch):
    """On 4 GPUs: the order of passes, and the most micro-batches held at once."""
    monkeypatch.syspath_prepend(REPOSITORY / "docs/figures")
    figure = importlib.import_module("draw_pipeline")
    p, m = figure.GPUS, figure.MICRO_BATCHES
    options = (
        "--layers=8",
        "--epochs=1",
        "--batch-size=8",
        "--sequences=32",
    )  # a step
    options += (f"--micro-batches={m}", f"--schedule={schedule}")
    ranks = start(tmp_path, "pipeline", *options, ranks=p, patch=note_chunks)
    v, most = figure.CHUNKS[name], []
    for gpu, (order, held) in enumerate(ranks.results()):
        assert order == figure.order_of(gpu, name, v=v) and len(order) == 2 * m * v
        assert held == v * figure.held_activations(order, v)
        most.append(held)
    if schedule == "GPipe":
        assert most == [m] * p  # all
    if schedule == "1F1B":
        assert most == [*range(p, 0, -1)]


@pytest.mark.parametrize(
    "script, ranks, options, words",
    [
        (
            "tensor_parallel",
            2,
            ["--heads=1"],
            "1 heads .* over 2 GPUs; use --heads 2",
        ),
        ("experts", 2, ["--experts=3"], "3 experts .* 2 GPUs; use --experts 8"),
        ("fsdp_tp", 2, ["--tensor=3"], "3 must divide 2 .* 4 heads; use --tensor 1"),
        ("fsdp_tp", 4, ["--heads=1"], "2 must divide 4 .* 1 heads; use --tensor 1"),
        ("pipeline", 4, [], "4 stages .*--layers 4"),
        ("pipeline", 2, ["--schedule=Interleaved1F1B"], "4 stages .*--layers 4"),
        ("pipeline", 2, ["--micro-batches=3"], "16 .* 3 .*; use --batch-size 3"),
        ("pipeline", 2, ["--sequences=70"], "have 6 .* not 16; use --sequences 80"),
        ("pipeline", 2, ["--micro-batches=1"], "--micro-batches 2, or .* GPipe"),
        (
            "pipeline",
            2,
            ["--schedule=Interleaved1F1B", "--layers=4", "--micro-batches=1"],
            "multiple of 2 .*; use --micro-batches 2",
        ),
    ],
)
def test_user_errors(script, ranks, options, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda: None)
    names = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": ranks}
    for name, value in names.items():
        monkeypatch.setenv(name, str(value))
    with raises_user_error(words):
        call(load(script), *TINY, "--batch-size=8", *options)
    assert not (tmp_path / "logs").exists()


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("g++"), reason="no C++ compiler")
def test_compiled_it_has_the_losses_of_one_process(tmp_path):
    seen = []
    for name, script, ranks in (("one", "../single", 0), ("two", "compiled", 2)):
        (tmp_path / name).mkdir()
        cache = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
        options = "--epochs=3", "--layers=1"
        run = start(tmp_path / name, script, *options, ranks=ranks, **cache)
        seen += run.results()
    alone, *ranks = seen
    assert alone["graphs"] == 0
    for rank in ranks:
        assert rank["graphs"] >= 2  # one is require_compiler()'s
        for its, ours in zip(rank["means"], alone["means"], strict=True):
            assert its == pytest.approx(ours, rel=1e-4)


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_measured_memory_is_as_calculated(ranks, tmp_path):
    script = "beyond_ddp/measure_memory.py"
    run = Run(tmp_path, "", script, ranks=ranks)
    assert run.join() == [0] * ranks, run.output()
    # PyTorch 2.14 warns of FSDP's views; 2.15 does not.
    warning = r"^/.*UserWarning: FSDP2-wrapped.*\n.*\n"
    output = re.sub(warning, "", run.output(), flags=re.M)
    title, _, _, *rows = output.splitlines()
    assert title.startswith(f"{ranks} ranks, 4 layers of width 128")
    readme = (HERE / "README.md").read_text()
    for row in output.splitlines():
        assert f"\n    {row.rstrip()}\n" in readme
    scripts = {row.split()[0] for row in rows}
    assert len(scripts) == len(rows) == 11
    assert {"ddp", "zero", "fsdp", "pipeline"} < scripts
    for row in rows:
        figures = [float(word) for word in row.split()[1:]]
        assert len(figures) == 10 and min(figures) > 0.1, row
        assert figures[::2] == pytest.approx(figures[1::2], rel=0.02), row


RING = """
import sys, torch, torch.distributed as dist
sys.path.append(sys.argv[1])
from torch.nn.functional import scaled_dot_product_attention
from ring_attention import ring_attention
dist.init_process_group()
rank, n = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
whole = torch.randn(4, 2, 3, 5 * n, 8)  # queries, keys, values, and a gradient
part = slice(5 * rank, 5 * rank + 5)
inputs = [t.clone().requires_grad_() for t in whole[:3]]
expected = scaled_dot_product_attention(*inputs, is_causal=True)
expected.backward(whole[3])
own = [t[:, :, part].clone().requires_grad_() for t in whole[:3]]
found = ring_attention(*own)
found.backward(whole[3][:, :, part])
torch.testing.assert_close(found, expected[:, :, part], rtol=0, atol=1e-5)
for one, other in zip(own, inputs):
    torch.testing.assert_close(one.grad, other.grad[:, :, part], rtol=0, atol=1e-5)
dist.destroy_process_group()
"""


@pytest.mark.parametrize("ranks", [1, 3])
def test_ring_attention_is_that_of_one_process(ranks, tmp_path):
    """Forward and backward, as PyTorch's kernel calculates them."""
    (tmp_path / "ring.py").write_text(RING)
    run = Run(tmp_path, "", tmp_path / "ring.py", HERE, ranks=ranks)
    assert run.join() == [0] * ranks, run.output()


def test_measure_bubble(tmp_path):
    tiny = "--batch-size=16", "--width=16", "--length=8", "--steps=3"
    script = "beyond_ddp/measure_bubble.py"
    run = Run(tmp_path, "", script, *tiny, ranks=2)
    assert run.join() == [0, 0], run.output()
    title, *rows = run.output().splitlines()
    assert title.startswith("2 GPUs")
    for row, stages in zip(rows, (1, 1, 2), strict=True):
        cells = re.findall(r"m = (\d+): (0\.\d\d) \((0\.\d\d)\)", row)
        assert [int(m) for m, _, _ in cells] == [2, 4, 8, 16]
        for m, measured, calculated in cells:
            bubble = 1 / (stages * int(m) + 1)
            assert float(calculated) == pytest.approx(bubble, abs=0.01)
            assert 0 < float(measured) < 1  # depends on the machine


@pytest.mark.parametrize(
    "script, lr, momentum", [("local_sgd", 1, 0), ("diloco", 0.7, 0.9)]
)
def test_weights_are_averaged_every_local_steps(script, lr, momentum, tmp_path):
    """Two epochs of four steps: after the third and the fourth of each."""
    module, seen = (
        load("local_sgd"),
        start(tmp_path, script, "--epochs=2", "--local-steps=3").results(),
    )
    data, models, optimizers = module.random_sequences(48, 16), [], []
    for _ in seen:
        torch.manual_seed(0)
        models.append(module.Transformer(2, 32, 4, 16))
        own = torch.optim.SGD(models[-1].parameters(), 0.3, momentum=0.9)
        optimizers.append(own)  # as record() has it
    shared = parameters_to_vector(models[0].parameters()).detach()
    velocity = torch.zeros_like(shared)
    samplers = [DistributedSampler(data, 2, rank) for rank in range(2)]
    for epoch in (1, 2):
        losses = []
        for sampler in samplers:
            sampler.set_epoch(epoch)
        orders = [torch.tensor(list(sampler)).split(6) for sampler in samplers]
        for step, indices in enumerate(zip(*orders, strict=True), 1):
            for model, own, chosen in zip(models, optimizers, indices, strict=True):
                logits = model(data.images[chosen]).flatten(0, 1)
                loss = cross_entropy(logits, data.labels[chosen].flatten())
                own.zero_grad()
                loss.backward()
                own.step()
                losses.append(loss.item())
            if step in (3, 4):
                vectors = [parameters_to_vector(m.parameters()) for m in models]
                change = shared - sum(vectors).detach() / 2
                velocity = momentum * velocity + change
                shared = shared - lr * (change + momentum * velocity)
                for model in models:
                    vector_to_parameters(shared.clone(), model.parameters())
        for rank in seen:
            found = rank["means"][epoch - 1]["loss"]
            assert found == pytest.approx(sum(losses) / 8, rel=1e-4)


@pytest.fixture
def shards(tmp_path, monkeypatch):
    """Write 16 files of 8 sequences of 16 tokens; return what makes a stream."""
    folder, random = tmp_path / "sequences", np.random.default_rng(0)
    folder.mkdir()
    for i in range(16):
        tokens = random.integers(256, size=8 * 16 + 1, dtype=np.uint8)
        np.save(folder / f"shard{i:02}.npy", tokens)
    module = load("data_stream")

    def stream(rank, workers, sequences=128):
        monkeypatch.setattr(module.dist, "get_rank", lambda: rank)
        monkeypatch.setattr(module.dist, "get_world_size", lambda: 2)
        return module.ShardStream(folder, sequences, 16, 4, workers, seed=0)

    return stream


def batches(stream, workers, epoch=1, first=0):
    stream.set_epoch(epoch, first)
    found = list(DataLoader(stream, None, num_workers=workers))
    assert len(found) == len(stream)
    return found


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("sequences", [128, 40])
def test_each_sequence_is_read_once(workers, sequences, shards):
    """By one worker of one rank; 40 are some of them."""
    seen = []
    for rank in range(2):
        for tokens, targets in batches(shards(rank, workers, sequences), workers):
            assert tokens.shape == targets.shape == (4, 16)
            assert torch.equal(tokens[:, 1:], targets[:, :-1])
            seen += map(tuple, tokens.tolist())
    assert len(seen) == sequences and len(set(seen)) == len(seen)


def test_each_epoch_has_another_order(shards, tmp_path):
    """Of the files, and of the sequences in a file."""

    def epochs(stream):
        found = [batches(stream, 0, epoch) for epoch in (1, 2, 1)]
        return [torch.cat([tokens for tokens, _ in epoch]) for epoch in found]

    one, two, again = epochs(shards(0, 0, 64))
    assert torch.equal(one, again) and not torch.equal(one, two)
    assert {*map(tuple, one.tolist())} != {*map(tuple, two.tolist())}
    first, *others = (tmp_path / "sequences").iterdir()
    for file in others:  # equal files: their order does not show
        shutil.copy(first, file)
    one, two, again = epochs(shards(0, 0, 128))
    assert torch.equal(one, again) and not torch.equal(one, two)
    assert {*map(tuple, one.tolist())} == {*map(tuple, two.tolist())}


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("first", [1, 6])
def test_a_stream_continues_in_an_epoch(workers, first, shards):
    stream = shards(1, workers)
    whole = batches(stream, workers)
    rest = batches(stream, workers, first=first)
    assert len(rest) == 16 - first
    for one, other in zip(rest, whole[first:], strict=True):
        assert torch.equal(one[0], other[0])


def test_shards_that_cannot_be_read(shards, tmp_path):
    with raises_user_error("6 readers .* cannot share 16 shards equally"):
        shards(0, 3)
    with raises_user_error("the shards have 128 sequences of 16 tokens"):
        shards(0, 0, 132)
    file = tmp_path / "sequences/shard03.npy"
    content = file.read_bytes()
    for size in 0, 140:
        file.write_bytes(content[:size])
        with raises_user_error("cannot read the shards .*: run `python"):
            shards(0, 0)
    for wrong in np.zeros(129), np.zeros(129, np.int8), np.zeros((3, 43), np.uint8):
        np.save(file, wrong)
        with raises_user_error(r"shard03.npy is \w+ \(.*, not uint8 \(n,\): run"):
            shards(0, 0)
    shutil.rmtree(file.parent)
    with raises_user_error("no shards of one size in .*write_shards.py"):
        shards(0, 0)


def test_a_full_disk_leaves_the_old_shards(tmp_path, monkeypatch):
    monkeypatch.setenv("DATADIR", str(tmp_path))
    module, folder = load("write_shards"), tmp_path / "sequences"
    call(module, "--shards=3", "--tokens=100")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
    with pytest.raises(OSError):
        call(module, "--shards=2", "--tokens=20000")
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [len(np.load(file)) for file in folder.iterdir()] == [101] * 3
    call(module, "--shards=2", "--tokens=200")
    assert [len(np.load(file)) for file in folder.iterdir()] == [201] * 2


@pytest.mark.parametrize("workers", [0, 2])
def test_streaming_has_the_losses_of_one_process(workers, tmp_path, monkeypatch):
    """Which sees in each step what the streams of two ranks give."""
    monkeypatch.setenv("DATADIR", str(tmp_path))
    call(load("write_shards"), "--shards=4", f"--tokens={12 * 16}")
    script, options = "beyond_ddp/streaming.py", ["--epochs=2"]
    options += ["--batch-size=6", f"--workers={workers}"]
    seen = Run(tmp_path, tmp_path, script, *TINY, *options, ranks=2, patch=record)
    seen, module, streams = seen.results(), load("data_stream"), []
    for rank in range(2):
        monkeypatch.setattr(module.dist, "get_rank", lambda rank=rank: rank)
        monkeypatch.setattr(module.dist, "get_world_size", lambda: 2)
        folder = tmp_path / "sequences"
        streams.append(module.ShardStream(folder, 48, 16, 6, workers, seed=0))
    torch.manual_seed(0)
    model = load("streaming").Transformer(2, 32, 4, 16)
    optimizer = torch.optim.SGD(model.parameters(), 0.3, momentum=0.9)  # record()'s
    for epoch in (1, 2):
        losses = []
        of_ranks = [batches(stream, workers, epoch) for stream in streams]
        for parts in zip(*of_ranks, strict=True):
            tokens, targets = map(torch.cat, zip(*parts, strict=True))
            logits = model(tokens).flatten(0, 1)
            loss = cross_entropy(logits, targets.flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        for rank in seen:
            found = rank["means"][epoch - 1]["loss"]
            assert found == pytest.approx(sum(losses) / len(losses), rel=1e-4)


class AllExperts(nn.Module):
    """A mixture in one process, where each token goes through all experts."""

    def __init__(self, experts, ranks, capacity):
        super().__init__()
        self.router = nn.Linear(32, experts)
        self.ranks, self.capacity = ranks, capacity

    def forward(self, x):
        rows = x.flatten(0, 1)
        weights = self.router(rows).softmax(-1)
        chosen = one_hot(weights.argmax(-1), len(self.experts))
        self.balance = (chosen.float().mean(0) * weights.mean(0)).sum()
        self.balance = self.balance * len(self.experts)
        if self.capacity:  # counted in each rank's part of the batch
            parts = chosen.chunk(self.ranks)
            limit = math.ceil(self.capacity * len(parts[0]) / len(self.experts))
            chosen = torch.cat([part * (part.cumsum(0) <= limit) for part in parts])
        results = torch.stack([expert(rows) for expert in self.experts], -1)
        return (results * (weights * chosen)[:, None]).sum(-1).view_as(x)


@pytest.mark.parametrize(
    "ranks, experts, balance, capacity", [(2, 4, 0.01, 0), (3, 6, 1, 0.8)]
)
def test_experts_on_other_ranks_train_as_in_one_process(
    ranks, experts, balance, capacity, tmp_path
):
    options = f"--experts={experts} --balance={balance} --capacity={capacity}"
    run = start(tmp_path, "experts", "--epochs=2", *options.split(), ranks=ranks)
    seen = run.results()
    if capacity:
        dropped = re.findall(r"dropped tokens (\S+)%", run.output())
        assert min(map(float, dropped)) > 0
    module = load("experts")
    torch.manual_seed(0)
    model, mixtures = module.Transformer(2, 32, 4, 16), []
    for block in model.layers[1:-2]:
        block.mlp = AllExperts(experts, ranks, capacity)
        mixtures.append(block.mlp)
    for mixture in mixtures:
        mlps = [
            (nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32))
            for _ in range(experts)
        ]
        mixture.experts = nn.ModuleList(nn.Sequential(*mlp) for mlp in mlps)
    optimizer = torch.optim.SGD(model.parameters(), 0.3, momentum=0.9)  # record()'s
    data = module.random_sequences(48, 16)
    samplers = [DistributedSampler(data, ranks, rank) for rank in range(ranks)]
    for epoch in (1, 2):
        losses = []
        for sampler in samplers:
            sampler.set_epoch(epoch)
        orders = [
            torch.tensor(list(sampler)).split(12 // ranks) for sampler in samplers
        ]
        for parts in zip(*orders, strict=True):
            chosen = torch.cat(parts)
            logits = model(data.images[chosen]).flatten(0, 1)
            loss = cross_entropy(logits, data.labels[chosen].flatten())
            losses.append(loss.item())
            optimizer.zero_grad()
            (loss + balance * sum(m.balance for m in mixtures)).backward()
            optimizer.step()
        for rank in seen:
            found = rank["means"][epoch - 1]["loss"]
            assert found == pytest.approx(sum(losses) / len(losses), rel=1e-4)
    own, all_experts = experts // ranks, [mixture.experts for mixture in mixtures]
    for rank, found in enumerate(seen):
        for mixture, of_layer in zip(mixtures, all_experts, strict=True):
            mixture.experts = of_layer[rank * own : (rank + 1) * own]
        for one, other in zip(found["weights"], model.parameters(), strict=True):
            torch.testing.assert_close(one, other.detach(), rtol=0, atol=1e-4)


def test_the_last_micro_batch_of_a_step_synchronises(monkeypatch):
    """10 micro-batches in steps of 4: the last step of an epoch is smaller."""
    module, sent, steps = load("accumulate"), [], []
    monkeypatch.setattr(module.dist, "all_reduce", lambda sums: None)
    model = load("model").Transformer(1, 16, 2, 8)
    model.register_forward_pre_hook(
        lambda *_: sent.append(model.require_backward_grad_sync)
    )
    weight = model.layers[0].token.weight
    weight.register_hook(
        lambda _: sent.append(model.require_backward_grad_sync)
    )  # in the backward pass
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    optimizer.register_step_post_hook(lambda *_: steps.append(len(sent) // 2))
    data = load("dataset").random_sequences(4, 8)
    batches = [data.__getitems__([0, 1])] * 10
    module.train(model, batches, optimizer, torch.device("cpu"), 4)
    assert steps == [4, 8, 10]
    assert sent[::2] == sent[1::2]  # forward and backward pass
    assert [number for number, sync in enumerate(sent[::2], 1) if sync] == steps
    assert all(p.grad is None for p in model.parameters())


# The formulas for memory and messages, and the table of what_fits.py. For a small
# model test_measured_memory_is_as_calculated compares them with a run.


@pytest.fixture
def formulas():
    return load("formulas")


@pytest.fixture
def what_fits():
    return load("what_fits")


# What the safetensors of https://huggingface.co/meta-llama have.
PUBLISHED = {"1b": 1_235_814_400, "8b": 8_030_261_248, "70b": 70_553_706_496}


def test_the_models_have_as_many_parameters_as_published(what_fits):
    for name, published in PUBLISHED.items():
        assert what_fits.total_parameters(what_fits.MODELS[name][1]) == published
    with torch.device("meta"):
        ours = sum(p.numel() for p in load("model").Transformer().parameters())
    assert what_fits.total_parameters(what_fits.MODELS["gpt2"][1]) == ours


def test_sent_bytes(formulas):
    """Cases that measure_memory.py does not have."""
    sent, n, size = formulas.sent_bytes, 8, 100
    for name in formulas.STRATEGIES:  # one GPU sends nothing
        assert sent(size, name, 1) == 0 == formulas.sent_activations(size, 4, name)
    # Gathered in 16 bits, FSDP sends no more than DDP; less if the root stays.
    half = sent(size, "FSDP", n, gathered=2)
    assert half == pytest.approx(sent(size, "DDP", n))
    less = sent(size, "FSDP", n, gathered=2, kept=40)
    assert half - less == pytest.approx(2 * 40 * 7 / 8)
    for name in ("TP", "pipeline"):  # nodes of 4: a quarter goes to the other node
        assert sent(size, name, n, 4) == sent(size / 4, "DDP", 2)
    # Activations to the next stage, gradients back.
    stages = [formulas.sent_activations(100, 12, "pipeline", n) for n in (2, 3, 8)]
    assert stages == [100, 200, 200]


def test_the_paper_has_the_same_formulas(formulas):
    """sbh(34 + 5as/h), and sbh(10 + 24/t) with TP, without dropout and 5as/h."""
    shape, sbh = formulas.Shape(1, 8192, 64, 64, 4 * 8192, 256, 1, False), 8192
    for t in (1, 2, 8):
        sums = 4 * (4 + 64 / t)  # in 32 bits, which the paper leaves out
        cut = formulas.block_activations(shape, 1, 2, t) - sums
        assert cut == pytest.approx(sbh * (10 - 2 + 24 / t))
        cut = formulas.block_activations(shape, 1, 2, t, sequence=True) - sums
        assert cut == pytest.approx(sbh * (34 - 2) / t)


def table(what_fits, capsys, *options):
    """Return {name of a row: cells} of the last table of a model."""
    call(what_fits, *options)
    lines = capsys.readouterr().out.split("One block")[0].splitlines()
    rows = [re.split(r" {2,}", line, maxsplit=1) for line in lines if "  " in line]
    return {row[0]: row[1].split() for row in rows if len(row) > 1 and row[0]}


def test_what_fits(what_fits, capsys):
    rows = table(what_fits, capsys, "--model", "8b", "--gpus", 8)
    assert set(rows) >= {"DDP", "FSDP", "FSDP + TP", "pipeline, first"}
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
    fits = {name: cells.count("fits") for name, cells in rows.items()}
    assert fits["DDP"] == fits["ZeRO-1"] == 0
    assert fits["FSDP"] == fits["HSDP"] == 1  # if activations are recomputed
    assert fits["TP"] == 2
    small = table(what_fits, capsys, "--model", "8b", "--gpus", 8, "--memory", 20)
    assert not any("fits" in cells for cells in small.values())


def test_nodes_that_are_not_full(what_fits):
    with raises_user_error("12 GPUs do not fill nodes of 8; use --gpus 8"):
        call(what_fits, "--gpus", 12)


def test_the_table_of_the_page_is_that_of_the_script(what_fits, capsys):
    """The indented block that follows the command."""
    block = r"^python beyond_ddp/what_fits.py(?: +#.*)?\n```\n((?:\n|    .*\n)+)"
    (shown,) = re.findall(block, (HERE / "WHAT_FITS.md").read_text(), re.M)
    call(what_fits)
    printed = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    shown = [line[4:].rstrip() for line in shown.splitlines()]
    assert [line for line in shown if line] == [line for line in printed if line]
    assert max(map(len, printed)) <= 96  # 4 more in a README
