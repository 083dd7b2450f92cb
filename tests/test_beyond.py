"""beyond_ddp/: checkpoints, schedules, attention, local steps, experts.

test_ddp.py tests that each script trains as one process does.
"""

import math
import re
import shutil
from functools import partial
from types import SimpleNamespace

import conftest
import pytest
import torch
import torch.distributed.checkpoint as dcp
from conftest import REPOSITORY, call, raises_user_error
from record_training import record
from run_ranks import Run
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.nn.functional import cross_entropy, one_hot
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.utils.data import DistributedSampler

HERE = REPOSITORY / "beyond_ddp"
TINY = ("--layers=2", "--width=32", "--heads=4", "--length=16", "--lr=0.3")
TINY += ("--sequences=48",)
load = partial(conftest.load, "beyond_ddp")


def start(folder, script, *options, ranks=2, patch=record, **env):
    """Run a script of the folder on batches of 12 sequences."""
    batch = f"--batch-size={12 // max(1, ranks)}"
    command = folder, folder, f"beyond_ddp/{script}.py", *TINY, batch, *options
    return Run(*command, ranks=ranks, patch=patch, **env)


def make_sgd(model):
    """Return the optimizer that record() gives to scripts."""
    return torch.optim.SGD(model.parameters(), 0.3, momentum=0.9)


def train_alone(model, epochs, extra_loss=lambda: 0):
    """Return the mean loss of each epoch, a list of batches, in this process."""
    optimizer, means = make_sgd(model), []
    for batches in epochs:
        losses = []
        for tokens, targets in batches:
            loss = cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
            losses.append(loss.item())
            optimizer.zero_grad()
            (loss + extra_loss()).backward()
            optimizer.step()
        means.append(sum(losses) / len(losses))
    return means


def check_losses(ranks, means):
    for rank in ranks:
        losses = [mean["loss"] for mean in rank["means"]]
        assert losses == pytest.approx(means, rel=1e-4)


def shuffled_indices(ranks, epoch):
    """Return each rank's shard of 48 sequences, in batches: 12 for all ranks."""
    samplers = [DistributedSampler(range(48), ranks, rank) for rank in range(ranks)]
    for sampler in samplers:
        sampler.set_epoch(epoch)
    return [torch.tensor([*sampler]).split(12 // ranks) for sampler in samplers]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Train for 3 epochs; return the records of all ranks, and the checkpoints."""
    folder = tmp_path_factory.mktemp("saved")
    ranks = start(folder, "fsdp_checkpoint", "--epochs=3").results()
    (logs,) = folder.glob("logs/*-fsdp_checkpoint-*")
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
    (folder,) = tmp_path.glob("logs/*-fsdp_checkpoint-*")
    assert {file.name for file in folder.glob("epoch*")} == {"epoch2", "epoch3"}


def test_saved_on_two_ranks_and_loaded_on_one(saved, tmp_path):
    (first, _), (_, second, _) = saved
    options = "--epochs=3", f"--resume={second}"
    (again,) = start(tmp_path, "fsdp_checkpoint", *options, ranks=1).results()
    (mean,) = again["means"]
    assert mean == pytest.approx(first["means"][2], rel=1e-4)


def test_checkpoints_that_are_refused(tmp_path, monkeypatch):
    """The message names the newest complete one, if there is one."""
    monkeypatch.chdir(tmp_path)
    module = load("dcp_checkpoint")
    with raises_user_error("^no complete checkpoint in none; leave out --resume$"):
        module.check_complete("none")
    for name in ("a/epoch2", "b/epoch1", "c/epoch3"):
        (tmp_path / "logs" / name).mkdir(parents=True)
        if name[0] != "c":
            (tmp_path / "logs" / name / ".metadata").touch()
    with raises_user_error("logs/c/epoch3; use --resume logs/b/epoch1$"):
        module.check_complete("logs/c/epoch3")
    module.check_complete("logs/a/epoch2")
    dcp.save({"a": torch.ones(2)}, checkpoint_id="logs/d")
    line = "logs/d is not a checkpoint of this script .ValueError: Size"
    with raises_user_error(line), module.resuming("logs/d"):
        dcp.load({"a": torch.ones(3)}, checkpoint_id="logs/d")
    monkeypatch.setattr("os.getuid", lambda: 12345)
    with raises_user_error("epoch2/.metadata of another user may run code"):
        module.check_complete("logs/a/epoch2")
    monkeypatch.setattr(module, "set_state_dict", lambda *_, **__: None)
    state = SimpleNamespace(model=None, optimizer=None, epochs=3)
    with raises_user_error("has 3 epochs; use --epochs 4"):
        saved = {"model": {}, "optimizer": {}, "epoch": 3}
        module.AppState.load_state_dict(state, saved)


def note_order(module, rank):
    """Make main() save the order of its passes: (kind, stage, micro-batch)."""
    order, main = [], module.main

    def noting(kind, function):
        def chunk(stage, number, *args, **kwargs):
            order.append((kind, stage.stage_index, number))
            return function(stage, number, *args, **kwargs)

        return chunk

    def noting_main():
        main()
        torch.save(order, f"{rank}.pt")

    for kind, name in (("F", "forward_one_chunk"), ("B", "backward_one_chunk")):
        setattr(PipelineStage, name, noting(kind, getattr(PipelineStage, name)))
    module.main = noting_main


@pytest.mark.parametrize(
    "schedule, kinds, stages",
    [
        ("GPipe", "FFFFBBBB", {1}),
        ("1F1B", "FBFBFBFB", {1}),
        ("Interleaved1F1B", "FFFBFBFBFBFBFBBB", {1, 3}),
    ],
)
def test_the_last_gpu_of_a_pipeline(schedule, kinds, stages, tmp_path):
    """Its passes in a step of four micro-batches on two GPUs, and its stages."""
    options = "--layers=4", "--epochs=1", "--batch-size=2", "--sequences=4"
    options += "--micro-batches=4", f"--schedule={schedule}"
    _, order = start(tmp_path, "pipeline", *options, patch=note_order).results()
    assert "".join(kind for kind, *_ in order) == kinds
    assert {stage for _, stage, _ in order} == stages


@pytest.mark.parametrize(
    "script, options, words",
    [
        ("tensor_parallel", "--heads=1", "1 heads .* over 2 GPUs; use --heads 2"),
        ("context_parallel", "--length=15", "15 tokens .* 2 GPUs; use --length 128"),
        ("experts", "--experts=3", "3 experts .* 2 GPUs; use --experts 8"),
        ("fsdp_tp", "--tensor=3", "3 must divide 2 .* 4 heads; use --tensor 1"),
        ("pipeline", "--schedule=Interleaved1F1B", "4 stages .*--layers 4"),
        ("pipeline", "--micro-batches=3", "16 .* 3 .*; use --batch-size 3"),
        ("pipeline", "--sequences=70", "have 6 .* not 16; use --sequences 80"),
    ],
)
def test_user_errors(script, options, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda: None)
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}
    for name, value in (ranks | {"MASTER_ADDR": "none", "MASTER_PORT": "1"}).items():
        monkeypatch.setenv(name, value)
    with raises_user_error(words):
        call(load(script), *TINY, "--batch-size=8", options)
    assert not (tmp_path / "logs").exists()


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("g++"), reason="no C++ compiler")
def test_compiled_it_has_the_losses_of_one_process(tmp_path):
    options = "--epochs=3", "--layers=1"
    (alone,) = start(tmp_path, "../dp_ddp_intro/single", *options, ranks=0).results()
    cache = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    ranks = start(tmp_path, "compiled", *options, **cache).results()
    assert [*(tmp_path / "cache").rglob("*.so")]
    check_losses(ranks, [mean["loss"] for mean in alone["means"]])


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


@pytest.mark.parametrize(
    "script, lr, momentum", [("local_sgd", 1, 0), ("diloco", 0.7, 0.9)]
)
def test_weights_are_averaged_every_local_steps(script, lr, momentum, tmp_path):
    """Two epochs of four steps: after the third and the fourth of each."""
    seen = start(tmp_path, script, "--epochs=2", "--local-steps=3").results()
    module, models = load("local_sgd"), []
    data = module.random_sequences(48, 16)
    for _ in seen:
        torch.manual_seed(0)
        models.append(module.Transformer(2, 32, 4, 16))
    optimizers, means = [make_sgd(model) for model in models], []
    shared = parameters_to_vector(models[0].parameters()).detach()
    velocity = torch.zeros_like(shared)
    for epoch in (1, 2):
        steps, losses = zip(*shuffled_indices(2, epoch), strict=True), []
        for step, indices in enumerate(steps, 1):
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
        means.append(sum(losses) / 8)
    check_losses(seen, means)


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
    module = load("experts")
    torch.manual_seed(0)
    model, mixtures = module.Transformer(2, 32, 4, 16), []
    for block in model.layers[1:-2]:
        block.mlp = AllExperts(experts, ranks, capacity)
        mixtures.append(block.mlp)
    for mixture in mixtures:
        mixture.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32))
            for _ in range(experts)
        )
    data, epochs = module.random_sequences(48, 16), []
    for epoch in (1, 2):
        steps = zip(*shuffled_indices(ranks, epoch), strict=True)
        chosen = [torch.cat(parts) for parts in steps]
        epochs.append([(data.images[i], data.labels[i]) for i in chosen])

    def balance_loss():
        return balance * sum(mixture.balance for mixture in mixtures)

    check_losses(run.results(), train_alone(model, epochs, balance_loss))
    if capacity:
        dropped = re.findall(r"dropped tokens (\S+)%", run.output())
        assert min(map(float, dropped)) > 0


def test_the_last_micro_batch_of_a_step_synchronises(monkeypatch):
    """10 micro-batches in steps of 4: the last step of an epoch is smaller."""
    module, synced, steps = load("accumulate"), [], []
    monkeypatch.setattr(module.dist, "all_reduce", lambda sums: None)
    model = load("model").Transformer(1, 16, 2, 8)

    def note(*_):  # in the forward pass, and in the backward pass
        synced.append(model.require_backward_grad_sync)

    model.register_forward_pre_hook(note)
    model.layers[0].token.weight.register_hook(note)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    optimizer.register_step_post_hook(lambda *_: steps.append(len(synced) // 2))
    data = load("dataset").random_sequences(4, 8)
    batches = [data.__getitems__([0, 1])] * 10
    module.train(model, batches, optimizer, torch.device("cpu"), 4)
    assert steps == [4, 8, 10]
    assert synced[::2] == synced[1::2]
    assert [number for number, sync in enumerate(synced[::2], 1) if sync] == steps
