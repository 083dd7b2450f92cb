"""dp_ddp_intro/: scripts as users run them, model, data and DataParallel by hand."""

import json
import math
import re
import shutil
import sys
from functools import partial

import conftest
import pytest
import torch
from conftest import call, copy_exercise, raises_user_error, run
from record_training import record
from run_ranks import Run
from torch.nn.functional import cross_entropy

TINY = ("--layers", 2, "--width", 32, "--heads", 4, "--length", 16, "--lr", 0.003)
LEARN = ("--layers", 1, "--width", 64, "--heads", 4, "--length", 32, "--lr", 0.01)
HELLO = (*TINY, "--epochs", 1, "--batch-size", 8, "--verbose")


@pytest.fixture
def exercise(tmp_path):
    return copy_exercise("dp_ddp_intro", tmp_path)


load = partial(conftest.load, "dp_ddp_intro")


def read_result(exercise):
    (line,) = (exercise / "logs/results.jsonl").open()
    return json.loads(line)


def test_the_loss_falls(exercise):
    options = [*LEARN, "--sequences", 256, "--epochs", 3, "--batch-size", 16]
    done = run(["bash", "jobscript.sh", "single.py", *options], exercise, SMALL="0")
    assert done.returncode == 0 and done.stderr == "", done.stderr
    line = r"^Epoch \d: [\d.]+ s, ([\d.]+) tokens/s; train loss ([\d.]+) "
    line += r"accuracy [\d.]+ %; step milliseconds ([\d.]+)$"
    epochs = re.findall(line, done.stdout, re.M)
    losses = [float(loss) for _, loss, _ in epochs]
    assert len(losses) == 3 and losses[-1] < 2 < 4 < math.log(256)
    speed, _, step = map(float, epochs[-1])
    assert 256 * 32 / speed == pytest.approx(16 * step / 1000, rel=0.01)
    assert read_result(exercise)["per_epoch"] == 256 * 32


@pytest.mark.parametrize(
    "launch, script, sizes",
    [
        ("jobscript_dp.sh", "dp.py", ["(4, 16)", "(8, 16)", "(8, 16)"]),
        ("jobscript_ddp.sh", "ddp.py", ["(2, 16)"] * 2 + ["(8, 16)"] * 2),
        ("jobscript_ddp.sh", "ddp_unfinished.py", ["(4, 16)"] * 2 + ["(8, 16)"] * 4),
        pytest.param(
            *("jobscript_ddp_2nodes.sh", "ddp.py"),
            ["(2, 16)"] * 2 + ["(8, 16)"] * 2,
            marks=pytest.mark.slow,
        ),
    ],
)
def test_each_process_prints_its_input_size(launch, script, sizes, exercise):
    """With 20 sequences and a batch size of 8."""
    command = ["bash", launch, script, *HELLO, "--sequences", 20]
    done = run(command, exercise, SMALL="0")
    assert done.returncode == 0 and done.stderr == "", done.stderr
    hello = re.findall(r"Hello from (.*)cpu with input size (\(.*?\))", done.stdout)
    assert sorted(size for _, size in hello) == sizes
    ranks = {"rank 0 on ", "rank 1 on "} if script != "dp.py" else {""}
    assert {rank for rank, _ in hello} == ranks
    assert read_result(exercise)["gpus"] == (1 if script == "dp.py" else 2)


@pytest.mark.slow
def test_plain_pytorch_computes_the_same_losses(exercise, tmp_path):
    """plain_ddp.py with plain torchrun, alone in a folder."""
    alone = tmp_path / "alone"
    alone.mkdir()
    shutil.copy(exercise / "plain_ddp.py", alone)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    torchrun.append("--local-addr=127.0.0.1")  # the machine may not know its name
    plain = run([*torchrun, "--nproc-per-node=2", "plain_ddp.py"], alone)
    size = ["--layers=1", "--heads=1", "--width=128", "--length=64", "--lr=0.003"]
    ours = run(["bash", "jobscript_ddp.sh", "ddp.py", *size], exercise)
    losses = [re.findall(r"train loss (\S+)", done.stdout) for done in (plain, ours)]
    assert len(losses[0]) == 4 and losses[0] == losses[1], plain.stderr


def test_the_model(capsys):
    model = load("model")
    with torch.device("meta"):
        full = model.Transformer()
    assert 84e6 < sum(p.numel() for p in full.parameters()) < 87e6
    torch.manual_seed(0)
    small = model.Transformer(2, 32, 4, 16, verbose=True).eval()
    tokens = torch.randint(0, 256, (3, 16))
    before = small(tokens)
    assert before.shape == (3, 16, 256)
    assert capsys.readouterr().out == "Hello from cpu with input size (3, 16)\n"
    other = tokens.clone()
    other[:, 5] = (other[:, 5] + 1) % 256
    after = small(other)  # a later token changes nothing before it
    assert torch.equal(after[:, :5], before[:, :5])
    assert ((after - before)[:, 5:].abs().amax(dim=(0, 2)) > 0).all()
    # One sequence does not see the others of its batch.
    torch.testing.assert_close(small(tokens[1:2]), before[1:2])
    mlp = model.Transformer(2, 32, 0, 16)  # without attention: a token sees itself
    assert ((mlp(other) - mlp(tokens)).abs().amax(dim=(0, 2)) > 0).nonzero() == 5


def test_the_pattern():
    data = load("dataset").random_sequences(200, 50)
    assert data.images.shape == data.labels.shape == (200, 50)
    assert torch.equal(data.images[:, 1:], data.labels[:, :-1])
    pairs = torch.zeros(256, 256)
    ones = torch.ones(200 * 50)
    pairs.index_put_((data.images.flatten(), data.labels.flatten()), ones, True)
    assert 0.88 < pairs.amax(dim=1).sum() / pairs.sum() < 0.93


def test_two_halves_train_like_the_whole_model(tmp_path):
    """With the whole batch, then with micro-batches of 3, 3, 3 and 1 sequences."""
    options = *TINY[:-2], "--lr", 0.3, "--sequences", 10, "--batch-size", 10
    runs = []
    for script, ranks, epochs in (("single", 0, 10), ("model_parallel", 2, 5)):
        command = f"dp_ddp_intro/{script}.py", *options, "--epochs", epochs
        run = Run(tmp_path, "", *command, ranks=ranks, patch=record)
        runs.append((run.results(), run.output()))
    (([alone], _), (_, output)) = runs
    losses = [mean["loss"] for mean in alone["means"]]
    assert len(losses) == 10 and losses[-1] < losses[0] - 0.5
    line = r"Micro-batches: (\d); [\d.]+ ms per step, [\d.]+ tokens/s; loss ([\d.]+)"
    naive, split = re.findall(f"^{line}$", output, re.M)
    assert (naive[0], split[0]) == ("1", "4")
    printed = [float(naive[1]), float(split[1])]
    assert printed == pytest.approx([losses[4], losses[9]], rel=2e-4)


def test_user_errors(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with raises_user_error("--width 108"):
        call(load("single"), "--width", 100, "--heads", 12)
    one = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    one |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    for name, value in one.items():
        monkeypatch.setenv(name, value)
    with raises_user_error("needs two processes, not 1"):
        call(load("model_parallel"))


# DataParallel by hand computes what DataParallel does, and counts its copies.


def test_two_replicas_give_the_gradients_of_the_whole_batch():
    by_hand = load("dp_by_hand")
    torch.manual_seed(0)
    model = by_hand.Transformer(2, 32, 4, 8)
    tokens, targets = torch.randint(256, (2, 6, 8))
    loss, _ = by_hand.step(model, tokens, targets)
    gradients = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    whole = cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
    whole.backward()
    assert loss.item() == pytest.approx(whole.item(), rel=1e-6)
    for mine, parameter in zip(gradients, model.parameters(), strict=True):
        torch.testing.assert_close(mine, parameter.grad, rtol=1e-4, atol=1e-6)
