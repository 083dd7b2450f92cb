"""mnist_multigpu/: three scripts, their profiles, their data and their errors."""

import gzip
import hashlib
import json
import re
import shutil
import socket
import sys
from argparse import Namespace
from itertools import chain

import pytest
import torch
from conftest import (
    REPOSITORY,
    call,
    copy_room,
    load,
    mistake,
    run,
    serving,
    torchrun,
)

from common.data import normalise

QUICK = ("--epochs", "1", "--batch-size", "64", "--log-interval", "3")


@pytest.fixture
def room(tmp_path):
    return copy_room("mnist_multigpu", tmp_path)


def check(done, room, processes, batches):
    """Return the result of a run that went well on 600 digits, tested on 100."""
    assert done.returncode == 0 and "Warning" not in done.stderr, done.stderr
    for line in (
        "Train set size: 600",
        "Test set size: 100",
        f"mnist_(singlegpu|multigpu|ddp) on {processes} x CPU core",
        r"Test set: Average loss: [\d.]+, Accuracy: (\d+)/100 \(\1 %\)",
        r"Total training time: [\d.]+ s",
    ):
        # The profiler's lines of another process may lack their ends.
        whole = rf"(?:^|\.txt|\.lprof|run:|-rtmz){line}$"
        assert len(re.findall(whole, done.stdout, re.M)) == 1, line
    host = socket.gethostname()
    assert re.search(rf"^Running on hosts? {host}, GPUs: none$", done.stdout, re.M)
    shown = re.findall(r"^Train Epoch: 1 \[(.*)\]\tLoss: \d", done.stdout, re.M)
    steps = [*range(3, batches, 3), batches]  # each log interval, and the last
    seen = [min(600, 64 * processes * step) for step in steps]
    assert shown == [f"{n}/600 ({n / 600:.0%})" for n in seen] and seen[-1] == 600
    (result,) = map(json.loads, (room / "logs/results.jsonl").open())
    assert result["gpus"] == processes
    return result


def test_one_gpu(room, sample):
    done = run(["bash", "slurm_singlegpu.sh", *QUICK], room, sample)
    check(done, room, 1, 10)
    assert sorted(file.name for file in room.iterdir() if file.suffix != ".py") == [
        "ANSWERS.md",
        "README.md",
        "ROWS.md",
        "common",
        "logs",
        *sorted(file.name for file in room.glob("*.sh")),
    ]


def test_data_parallel_and_the_report_of_its_profile(room, sample):
    done = run(["bash", "slurm_multigpu.sh", *QUICK], room, sample)
    check(done, room, 1, 10)
    assert len(list(room.glob("*_1.lprof"))) == 1
    report = done.stdout[done.stdout.index("Timer unit") :]
    for line in ("Function: train at", "Function: test at"):
        assert report.count(line) == 1
    assert re.search(r"\d+\.\d +loss\.backward\(\)", report)


def test_what_the_course_types_and_its_report(room, sample):
    done = run(["bash", "slurm_multigpu.sh"], room, sample)
    assert done.returncode == 0, done.stderr
    assert len(re.findall(r"^Test set: ", done.stdout, re.M)) == 5
    (result,) = map(json.loads, (room / "logs/results.jsonl").open())
    assert result["batch_per_gpu"] == 128 and result["options"]["epochs"] == 5
    head = done.stdout[done.stdout.index("Timer unit") :]
    for line in (
        r"Timer unit: 1e-06 s",
        r"Total time: [\d.]+ s",
        r"File: mnist_multigpu.py",
        r"Function: train at line \d+",
        r"Line #  +Hits  +Time  Per Hit  +% Time  Line Contents",
    ):
        assert re.search(f"^{line}$", head, re.M), line
    assert re.search(r"^ +\d+ +25 .* loss.backward\(\)", head, re.M)  # 5 x 5 batches


@pytest.mark.slow
@pytest.mark.parametrize("launch", ["slurm_singlegpu.sh", "slurm_ddp.sh"])
def test_workers_load_the_same_images(launch, room, sample):
    for workers in (0, 1):
        done = run(["bash", launch, *QUICK, "--workers", workers], room, sample)
        assert done.returncode == 0 and done.stderr == "", done.stderr
    none, one = map(json.loads, (room / "logs/results.jsonl").open())
    assert one["options"]["workers"] == 1 and one["accuracy"] == none["accuracy"]


@pytest.mark.parametrize(
    "launch",
    ["slurm_ddp.sh", pytest.param("slurm_ddp_2nodes.sh", marks=pytest.mark.slow)],
)
def test_ddp_and_a_profile_of_each_rank(launch, room, sample):
    command = ["bash", launch, *QUICK, "--save-model"]
    done = run(command, room, sample, LINE_PROFILE="1")
    check(done, room, 2, 5)
    for rank in (0, 1):
        assert "train at line" in (room / f"logs/rank{rank}.txt").read_text()
        assert (room / f"logs/rank{rank}.lprof").exists()
    module = load("mnist_multigpu", "mnist_singlegpu")

    model = module.make_model()
    model.load_state_dict(torch.load(room / "mnist_cnn.pt"))
    assert not list(room.glob("*.part"))


def test_two_halves_of_a_batch_train_like_the_whole(tmp_path):
    (tmp_path / "common").symlink_to(REPOSITORY / "common")
    folder, worker = REPOSITORY / "mnist_multigpu", REPOSITORY / "tests/digits.py"
    done = run([sys.executable, worker, folder / "mnist_singlegpu.py"], tmp_path)
    assert done.returncode == 0, done.stderr
    halves = torchrun(2, [worker, folder / "mnist_ddp.py"], tmp_path)
    assert halves.returncode == 0, halves.stderr
    whole, half, other = (
        torch.load(tmp_path / file) for file in ("1.0.pt", "2.0.pt", "2.1.pt")
    )
    for name, value in whole["after"].items():
        torch.testing.assert_close(half["after"][name], value, rtol=0, atol=1e-5)
        assert torch.equal(half["after"][name], other["after"][name])
    assert (
        whole["after"]["2.weight"] - whole["before"]["2.weight"]
    ).abs().max() > 1e-3
    # The loss shown is that of both halves, and shown once.
    losses, both = (
        [float(loss) for loss in re.findall(r"Loss: ([\d.]+)", run.stdout)]
        for run in (done, halves)
    )
    assert len(losses) == 3 and both == pytest.approx(losses, abs=2e-5)


@pytest.mark.slow
def test_shares_of_three_processes(sample, tmp_path):
    one, three = tmp_path / "one", tmp_path / "three"
    spy, folder = REPOSITORY / "tests/spy_mnist.py", REPOSITORY / "mnist_multigpu"
    for room in (one, three):
        room.mkdir()
        (room / "common").symlink_to(REPOSITORY / "common")
    script, ddp = folder / "mnist_singlegpu.py", folder / "mnist_ddp.py"
    done = run([sys.executable, spy, script, "--epochs", 2], one, sample)
    assert done.returncode == 0, done.stderr
    done = torchrun(3, [spy, ddp, "--epochs", 2], three, sample)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Test set: ") == 2
    alone = torch.load(one / "0.pt")
    seen = [torch.load(three / f"{rank}.pt") for rank in range(3)]
    assert len({rank["random"][0] for rank in seen}) == 3  # dropout differs
    for epoch in (0, 1):
        assert sorted(chain(*(rank["orders"][epoch] for rank in seen))) == [
            *range(600)
        ]
        tested = [rank["tested"][epoch] for rank in seen]
        assert sorted(chain(*(indices for indices, _ in tested))) == [*range(100)]
        for _, result in tested:
            assert result["accuracy"] == alone["tested"][epoch][1]["accuracy"]
    assert seen[0]["orders"][0] != seen[0]["orders"][1]
    events = [path for path in three.rglob("*") if "tfevents" in path.name]
    assert (
        len(events) == 1
        and len((three / "logs/results.jsonl").open().readlines()) == 1
    )


@pytest.mark.parametrize("optimizer", ["adadelta", "adam", "rmsprop"])
@pytest.mark.parametrize("scheduler", ["step", "exponential", "cosine"])
def test_optimizers_and_schedules(optimizer, scheduler):
    module = load("mnist_multigpu", "mnist_singlegpu")

    model = torch.nn.Linear(2, 1)
    chosen = module.OPTIMIZERS[optimizer](model.parameters(), None)
    assert type(chosen).__name__.lower() == optimizer
    first = chosen.param_groups[0]["lr"]
    assert first == (1.0 if optimizer == "adadelta" else 0.001)
    given = module.OPTIMIZERS[optimizer](model.parameters(), 0.5)
    assert given.param_groups[0]["lr"] == 0.5
    args = Namespace(gamma=0.7, epochs=4)
    schedule = module.SCHEDULERS[scheduler](chosen, args)
    chosen.step()
    schedule.step()
    rate = chosen.param_groups[0]["lr"] / first
    assert rate == pytest.approx(0.85355 if scheduler == "cosine" else 0.7, abs=1e-4)


def test_the_network_is_the_one_of_the_text():
    """ReLU and max-pooling change places, which changes no number."""
    from torch import nn

    module = load("mnist_multigpu", "mnist_singlegpu")

    torch.manual_seed(0)
    model = module.make_model().eval()
    plain = nn.Sequential(*model)
    plain[3], plain[4] = nn.ReLU(), nn.MaxPool2d(2)
    convolutions = [nn.Conv2d, nn.ReLU, nn.Conv2d, nn.ReLU, nn.MaxPool2d, nn.Dropout]
    top = [nn.Flatten, nn.Linear, nn.ReLU, nn.Dropout, nn.Linear, nn.LogSoftmax]
    assert [type(layer) for layer in plain] == convolutions + top
    images = torch.randn(4, 1, 28, 28)
    grads = []
    for net in (model, plain.eval()):
        net.zero_grad()
        output = net(images)
        output[:, 3].sum().backward()
        grads.append([output.detach()] + [p.grad.clone() for p in net.parameters()])
    for ours, its in zip(*grads, strict=True):
        torch.testing.assert_close(ours, its)


def test_digits_are_in_memory(sample, monkeypatch):
    monkeypatch.setenv("DATADIR", str(sample))
    dataset = load("mnist_multigpu", "dataset")
    train_set, test_set = dataset.mnist()
    assert (len(train_set), len(test_set)) == (600, 100)
    images, labels = train_set.__getitems__([5, 9])
    assert images.shape == (2, 1, 28, 28) and images.dtype == torch.uint8
    assert labels.dtype == torch.int64 and set(train_set.labels.tolist()) == set(
        range(10)
    )
    digits = normalise(images, dataset.MEAN, dataset.STD)
    torch.testing.assert_close(digits, (images / 255 - 0.1307) / 0.3081)


def fails(words, *options):
    with mistake(words):
        call(load("mnist_multigpu", "mnist_singlegpu"), *options)


def test_no_data(tmp_path, monkeypatch):
    monkeypatch.setenv("DATADIR", str(tmp_path))
    fails(r"no data .* `python download_data.py`")


@pytest.mark.parametrize("size", [0, 5, 1000, None])
def test_damaged_data(size, sample, tmp_path, monkeypatch):
    broken = shutil.copytree(sample / "MNIST", tmp_path / "MNIST")
    file = broken / "raw/train-images-idx3-ubyte"
    body = file.read_bytes()
    file.unlink()
    if size is not None:
        file.write_bytes(body[:size])
    monkeypatch.setenv("DATADIR", str(tmp_path))
    with mistake(r"damaged .*delete it"):
        load("mnist_multigpu", "dataset").mnist()


@pytest.mark.parametrize("option", [("--epochs", "0"), ("--batch-size", "-3")])
def test_bad_options(option):
    fails(option[0], *option)


def test_a_model_that_cannot_be_saved(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mnist_cnn.pt").mkdir()
    fails("cannot write mnist_cnn.pt", "--save-model")
    assert not (tmp_path / "logs").exists()


def test_download_copies_a_folder(sample, tmp_path, monkeypatch):
    target, module = tmp_path / "data", load("mnist_multigpu", "download_data")
    monkeypatch.setenv("DATADIR", str(target))
    with mistake("none"):
        call(module, "--from", tmp_path / "none")
    assert not (target / "MNIST").exists()
    for folder in (sample, sample / "MNIST", sample / "MNIST/raw"):
        shutil.rmtree(target, ignore_errors=True)
        call(module, "--from", folder)
        assert [path.name for path in target.iterdir()] == ["MNIST"]
        assert len(list((target / "MNIST/raw").iterdir())) == 4
    shutil.rmtree(target)
    both = tmp_path / "both"  # FashionMNIST's files have the same names
    for name in ("FashionMNIST", "MNIST"):
        shutil.copytree(sample / "MNIST", both / name)
    with mistake("no whole MNIST in .*2 folders"):
        call(module, "--from", both)
    assert not target.exists() or list(target.iterdir()) == []
    (target / "MNIST.unpacking/MNIST/raw").mkdir(parents=True)  # of a killed call
    call(module, "--from", both / "MNIST")
    assert [path.name for path in target.iterdir()] == ["MNIST"]
    shutil.rmtree(target)
    half = shutil.copytree(sample / "MNIST", tmp_path / "half")
    file = half / "raw/t10k-images-idx3-ubyte"
    file.write_bytes(file.read_bytes()[:99])
    with mistake("no whole MNIST in"):
        call(module, "--from", half)
    assert not (target / "MNIST").exists()


def test_download_from_a_server(sample, tmp_path, monkeypatch):
    from torchvision.datasets import MNIST

    module = load("mnist_multigpu", "download_data")
    served = tmp_path / "served"
    served.mkdir()
    resources = []
    for file in (sample / "MNIST/raw").iterdir():
        packed = gzip.compress(file.read_bytes())
        (served / f"{file.name}.gz").write_bytes(packed)
        resources.append((f"{file.name}.gz", hashlib.md5(packed).hexdigest()))
    monkeypatch.setattr(MNIST, "resources", resources)
    monkeypatch.setattr(MNIST, "mirrors", [])
    monkeypatch.setenv("DATADIR", str(tmp_path / "data"))
    with serving(served) as url:
        gone = served / resources[-1][0]
        gone.rename(tmp_path / "gone")  # it breaks off at the last file
        with mistake(r"login node"):
            call(module, "--url", f"{url}/")
        assert not (tmp_path / "data/MNIST").exists()
        (tmp_path / "gone").rename(gone)
        call(module, "--url", f"{url}/")
    assert [path.name for path in (tmp_path / "data").iterdir()] == ["MNIST"]
    assert len(load("mnist_multigpu", "dataset").mnist()[0]) == 600
