"""dp_ddp_intro/: what DP, DDP and a model on two devices compute and say."""

import filecmp
import json
import math
import re
import sys
from functools import partial
from itertools import chain

import conftest
import pytest
import torch
from conftest import REPOSITORY, call, copy_room, mistake, run, torchrun
from test_steps import Watch
from torch.nn.functional import cross_entropy

INTRO, SPY = REPOSITORY / "dp_ddp_intro", REPOSITORY / "tests/spy_intro.py"
TINY = ("--layers", 2, "--width", 32, "--heads", 4, "--length", 16, "--lr", 0.003)
LEARN = ("--layers", 1, "--width", 64, "--heads", 4, "--length", 32, "--lr", 0.01)
HELLO = (*TINY, "--epochs", 1, "--batch-size", 8, "--verbose")


@pytest.fixture
def room(tmp_path):
    return copy_room("dp_ddp_intro", tmp_path)


load = partial(conftest.load, "dp_ddp_intro")


def results(room):
    return [json.loads(line) for line in (room / "logs/results.jsonl").open()]


def test_it_learns_and_the_speeds_are_compared(room):
    options = [*LEARN, "--sequences", 256, "--epochs", 3]
    solution = "solutions/ddp_with_sampler.py"
    for job in (["jobscript.sh", "single.py"], ["jobscript_ddp.sh", solution]):
        done = run(["bash", *job, *options, "--batch-size", 16], room)
        assert done.returncode == 0 and done.stderr == "", done.stderr
        epochs = re.findall(
            r"^Epoch \d: [\d.]+ s, ([\d.]+) tokens/s; train loss ([\d.]+) "
            r"accuracy [\d.]+ %; step milliseconds ([\d.]+)$",
            done.stdout,
            re.M,
        )
        losses = [float(loss) for _, loss, _ in epochs]
        assert len(losses) == 3 and losses[-1] < 2 < 4 < math.log(256)
        # What is printed is the whole job's: its tokens in the time of its steps.
        speed, _, step = map(float, epochs[-1])
        steps = 16 if job[1] == "single.py" else 8
        assert 256 * 32 / speed == pytest.approx(steps * step / 1000, rel=0.01)
        result = results(room)[-1]
        assert result["tokens_per_epoch"] == 256 * 32
        assert "images_per_second" not in result
    done = run([sys.executable, "../bench/compare.py", "logs/results.jsonl"], room)
    title, header, one, two = done.stdout.splitlines()[1:5]
    assert title.startswith("single.py") and "8192 tokens an epoch" in title
    assert "tokens/s" in header and "images" not in done.stdout
    assert one.split()[:2] == ["single", "1"]
    assert two.split()[:2] == ["ddp_with_sampler", "2"]
    alone, both = (result["tokens_per_second"] for result in results(room))
    assert f"{alone:.1f}" in one and f"{both:.1f}" in two
    assert f"{both / alone:.2f}" in two.split()


@pytest.mark.slow
def test_two_nodes_say_hello(room):
    options = [*HELLO, "--sequences", 20]
    done = run(["bash", "jobscript_ddp_2nodes.sh", "ddp.py", *options], room)
    assert done.returncode == 0, done.stderr
    hello = re.findall(r"Hello from cpu with input size (\(.*?\))", done.stdout)
    assert sorted(hello) == ["(2, 16)"] * 2 + ["(8, 16)"] * 2  # 8 and 2 in each
    assert results(room)[0]["gpus"] == 2


def test_data_parallel_takes_a_batch_for_all(tmp_path, monkeypatch, capfd):
    """Without GPUs it cannot cut it: that is for the test below."""
    dp = load("dp")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    monkeypatch.setattr(dp, "get_device", lambda: torch.device("cpu"))
    options = [*HELLO, "--sequences", 16]
    monkeypatch.setattr(sys, "argv", ["dp.py", *map(str, options)])
    dp.main()
    said = capfd.readouterr().out
    assert said.count("Hello from cpu with input size (16, 16)") == 1
    assert "8 per CPU core x 2 CPU cores = 16" in said


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_data_parallel_cuts_a_batch(room):
    options = [*HELLO, "--sequences", 16]
    done = run([sys.executable, "dp.py", *options], room, CUDA_VISIBLE_DEVICES="0,1")
    for gpu in (0, 1):
        assert f"Hello from cuda:{gpu} with input size (8, 16)" in done.stdout


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """What was seen in 20 steps on batches of 16 in all: {name: one a rank}."""
    options, seen = [*TINY, "--lr", 0.4, "--sequences", 80, "--epochs", 4], {}
    for name, deal in {"single": "1", "ddp": "", "ddp_no_sampler": ""}.items():
        folder = tmp_path_factory.mktemp(name)
        (folder / "common").symlink_to(REPOSITORY / "common")
        processes = 1 if name == "single" else 2
        command = [SPY, INTRO / f"{name}.py", *options]
        command += ["--batch-size", 16 // processes]
        if processes == 1:
            done = run([sys.executable, *command], folder, DEAL=deal)
        else:
            done = torchrun(2, command, folder, DEAL=deal)
        assert done.returncode == 0, done.stderr
        seen[name] = [torch.load(folder / f"{r}.pt") for r in range(processes)]
        seen[name][0]["said"] = done.stdout
    return seen


def test_two_processes_follow_one_on_the_same_batches(runs):
    (one,), (first, second) = runs["single"], runs["ddp"]
    assert len(one["losses"]) == len(first["losses"]) == 20
    for alone, *halves in zip(
        one["losses"], first["losses"], second["losses"], strict=True
    ):
        assert sum(halves) / 2 == pytest.approx(alone, rel=0, abs=1e-4)
    assert one["losses"][-1] < one["losses"][0] - 0.5
    assert first["losses"] != second["losses"]
    shown = re.findall(r"train loss [\d.]+ accuracy [\d.]+", one["said"])
    assert len(shown) == 4
    assert shown == re.findall(r"train loss [\d.]+ accuracy [\d.]+", first["said"])


def test_the_data_are_the_same_in_every_process(runs):
    ranks = list(chain(*runs.values()))
    assert len(ranks) == 5
    for seen in ranks:
        for mine, first in zip(seen["data"], ranks[0]["data"], strict=True):
            assert torch.equal(mine, first)


def test_with_the_sampler_each_sequence_is_seen_once_an_epoch(runs):
    epochs = list(zip(*(seen["epochs"] for seen in runs["ddp"]), strict=True))
    assert len(epochs) == 4
    for shares in epochs:
        assert sorted(chain(*shares)) == [*range(80)]
    assert len({tuple(shares[0]) for shares in epochs}) == 4  # dealt anew


def test_without_it_each_is_seen_once_by_every_process(runs):
    ranks = runs["ddp_no_sampler"]
    for shares in zip(*(seen["epochs"] for seen in ranks), strict=True):
        assert sorted(chain(*shares)) == sorted([*range(80), *range(80)])
        assert shares[0] == shares[1]  # so the second process adds nothing
    assert ranks[0]["losses"] == ranks[1]["losses"]
    assert len(ranks[0]["losses"]) == 40  # twice as many steps


def test_the_solution_is_the_script_with_the_sampler():
    solution = INTRO / "solutions/ddp_with_sampler.py"
    assert filecmp.cmp(INTRO / "ddp.py", solution, shallow=False)


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
    for place in (5, 15):  # what comes later changes nothing before it
        other = tokens.clone()
        other[:, place] = (other[:, place] + 1) % 256
        after = small(other)
        assert torch.equal(after[:, :place], before[:, :place])
        changed = (after - before)[:, place:].abs().amax(dim=(0, 2))
        assert (changed > 0).all()
    # One sequence does not see the others of its batch.
    torch.testing.assert_close(small(tokens[1:2]), before[1:2])


def test_the_pattern():
    data = load("dataset").random_sequences(200, 50)
    assert data.images.shape == data.labels.shape == (200, 50)
    assert torch.equal(data.images[:, 1:], data.labels[:, :-1])
    pairs = torch.zeros(256, 256)
    ones = torch.ones(200 * 50)
    pairs.index_put_((data.images.flatten(), data.labels.flatten()), ones, True)
    assert 0.88 < pairs.amax(dim=1).sum() / pairs.sum() < 0.93


def test_an_epoch_waits_for_the_device_once(monkeypatch):
    module, device = load("single"), torch.device("cpu")
    model = load("model").Transformer(1, 16, 2, 8)
    optimizer = torch.optim.SGD(model.parameters())  # Adam counts on the host
    batches = [load("dataset").random_sequences(4, 8).__getitems__([0, 1])] * 4
    module.train(model, batches[:1], optimizer, device)
    reads, tolist = [], torch.Tensor.tolist
    monkeypatch.setattr(
        torch.Tensor, "tolist", lambda tensor: reads.append(1) or tolist(tensor)
    )
    with Watch() as watch:
        module.train(model, batches, optimizer, device)
    assert watch.waits == [] and len(reads) == 1


def test_two_halves_of_a_model_compute_what_the_whole_does(tmp_path):
    (tmp_path / "common").symlink_to(REPOSITORY / "common")
    done = torchrun(2, [REPOSITORY / "tests/layers.py", INTRO], tmp_path)
    assert done.returncode == 0, done.stderr
    halves = [torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1)]
    torch.manual_seed(0)
    model = load("model").Transformer(3, 32, 4, 16)
    tokens, targets = (
        load("dataset").random_sequences(10, 16).__getitems__(range(10))
    )
    output = model(tokens)
    loss = cross_entropy(output.flatten(0, 1), targets.flatten())
    loss.backward()
    whole = [p.grad for p in model.parameters()]
    for micro_batches in (1, 2, 4):  # 4: of 3, 3, 3 and 1
        first, second = (half[micro_batches] for half in halves)
        assert second["pieces"] == micro_batches
        torch.testing.assert_close(second["output"], output.detach().flatten(0, 1))
        torch.testing.assert_close(second["loss"], loss.detach())
        assert len(first["gradients"]) > 1 and len(second["gradients"]) > 1
        gradients = first["gradients"] + second["gradients"]
        for mine, plain in zip(gradients, whole, strict=True):
            torch.testing.assert_close(mine, plain, rtol=1e-4, atol=1e-7)


def test_model_parallel_both_ways(room):
    options = [*LEARN, "--sequences", 64, "--micro-batches", 2]
    done = run(["bash", "jobscript_ddp.sh", "model_parallel.py", *options], room)
    assert done.returncode == 0, done.stderr
    line = r"Micro-batches: (\d); [\d.]+ ms a step, [\d.]+ tokens/s; loss ([\d.]+)"
    naive, cut = re.findall(f"^{line}$", done.stdout, re.M)
    assert (naive[0], cut[0]) == ("1", "2") and float(cut[1]) < float(naive[1]) < 5.5


@pytest.mark.parametrize(
    "script, ranks, options, words",
    [
        ("ddp", 0, [], "--nproc-per-node=2 .*ddp.py"),
        ("single", 0, ["--width", 100, "--heads", 12], "--width 108"),
        ("single", 2, [], "python .*single.py"),
        ("model_parallel", 1, [], "two halves .*1 GPUs"),
    ],
)
def test_mistakes(script, ranks, options, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "LOCAL_RANK") if ranks else ():
        monkeypatch.setenv(name, "0")
        monkeypatch.setenv("WORLD_SIZE", str(ranks))
    with mistake(words):
        call(load(script), *options)
    assert not (tmp_path / "logs").exists()


def test_no_script(room):
    done = run(["bash", "jobscript_ddp.sh"], room)
    assert done.returncode == 2 and done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    assert "sbatch jobscript_ddp.sh SCRIPT.py" in done.stderr


@pytest.mark.parametrize(
    "launch, script",
    [
        ("jobscript_dp.sh", "dp.py"),
        ("jobscript_ddp.sh", "ddp.py"),
        ("jobscript_ddp.sh", "ddp_no_sampler.py"),
    ],
)
def test_a_run(launch, script, room):
    options = [*TINY, "--sequences", 16, "--epochs", 1, "--batch-size", 4]
    done = run(["bash", launch, script, *options], room)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    assert results(room)[0]["gpus"] == (1 if script == "dp.py" else 2)


def test_the_drawing(room):
    before = (room / "img/all_reduce.png").read_bytes()
    (room / "img/all_reduce.png").unlink()
    done = run([sys.executable, room / "draw_all_reduce.py"], "/")
    assert done.returncode == 0, done.stderr
    after = (room / "img/all_reduce.png").read_bytes()
    assert after.startswith(b"\x89PNG") and 0.5 < len(after) / len(before) < 2
