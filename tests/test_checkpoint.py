"""Checkpoints: killed at any moment and resumed, a run ends as if it never was."""

import os
import resource
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch
from conftest import copy_room
from conftest import load as load_module
from ranks import Run

from common import checkpoint
from common.cli import UserError

State = load_module("cinic_lab", "state").State
# 100 images: 5 steps of 24 in an epoch, the last smaller; each process has a half.
OPTIONS = "--epochs", 3, "--lr", 0.01, "--log-interval", 1


@pytest.fixture
def room(tmp_path):
    return copy_room("cinic_lab", tmp_path)


def whole(room, datadir, script, ranks):
    """Return the checkpoint of a run that was never killed."""
    run = Run(room, datadir, script, *options(ranks), ranks=ranks)
    assert run.join() == [0] * max(1, ranks), run.output()
    return load(room)


def options(ranks):
    return *OPTIONS, "--batch-size", 12 if ranks == 2 else 24


def load(room, file="checkpoint.pth.tar"):
    return torch.load(room / file, weights_only=True)


def equal(a, b):
    """Say whether two checkpoints are equal to the bit."""
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return list(a) == list(b) and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(equal, a, b))
    return a == b


def kill_in(run, line):
    deadline = time.monotonic() + 120
    while line not in run.output():
        assert time.monotonic() < deadline and run.alive(), run.output()
        time.sleep(0.01)
    assert set(run.kill()) == {-signal.SIGKILL}


@pytest.mark.parametrize(
    "script, ranks",
    [("cinic.py", 0), pytest.param("cinic_ddp.py", 2, marks=pytest.mark.slow)],
)
def test_killed_and_resumed(script, ranks, room, sample, tmp_path):
    (tmp_path / "other").mkdir()
    undisturbed = whole(
        copy_room("cinic_lab", tmp_path / "other"), sample, script, ranks
    )
    run = Run(room, sample, script, *options(ranks), ranks=ranks)
    kill_in(run, "Epoch: [2][3/5]")
    assert load(room)["epoch"] == 1
    saved = shutil.copytree(room, tmp_path / "saved", symlinks=True)
    resume = *options(ranks), "--resume", "checkpoint.pth.tar"
    run = Run(room, sample, script, *resume, ranks=ranks)
    assert run.join() == [0] * max(1, ranks), run.output()
    assert "Epoch: [2][1/5]" in run.output() and "Epoch: [1]" not in run.output()
    assert equal(load(room), undisturbed)
    assert not any(key.startswith("module.") for key in undisturbed["model"])
    if ranks:  # with one process instead of two, and with two instead of one
        states = [load(saved)["random"]]
        for other, name in ((0, "cinic_tensorboard.py"), (2, "cinic_ddp.py")):
            resume = *OPTIONS, "--epochs", 3, "--resume", "checkpoint.pth.tar"
            run = Run(saved, sample, name, *resume, ranks=other)
            if other == 0:
                kill_in(run, "Epoch: [3]")
            else:
                assert run.join() == [0, 0], run.output()
            states.append(load(saved)["random"])
        assert [len(random) for random in states] == [2, 1, 2]
        assert load(saved)["epoch"] == 3
        assert not torch.equal(states[2][0]["cpu"], states[2][1]["cpu"])
    assert not list(room.glob("*.part"))


class Made:
    """A State of a small model, with random numbers to draw."""

    def __init__(self, arch="resnet18"):
        torch.manual_seed(3)
        self.model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(self.model.parameters(), 0.1, 0.9)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 9)
        device = torch.device("cpu")
        self.state = State(
            self.model, optimizer, scheduler, device, arch=arch, epochs=9
        )

    def change(self):
        """Move the weights by a random number."""
        with torch.no_grad():
            self.model.weight += torch.rand(1)


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_random_numbers_go_on(here):
    made = Made()
    made.state.save(1, 50.0)
    expected = torch.rand(3)
    again = Made()
    again.state.resume("checkpoint.pth.tar")
    assert torch.equal(torch.rand(3), expected)
    assert (again.state.epoch, again.state.best) == (1, 50.0)


def test_a_best_epoch_is_copied_from_the_device_once(here, monkeypatch):
    saves, original = [], torch.save
    monkeypatch.setattr(torch, "save", lambda *a: saves.append(1) or original(*a))
    Made().state.save(1, 50.0)
    files = [Path(name).read_bytes() for name in (State.BEST, State.LATEST)]
    assert len(saves) == 1 and files[0] == files[1]


def test_the_best_model_is_right_after_a_kill_between_the_two_files(here):
    """Killed at each of the renames, and resumed, accuracy by accuracy."""
    accuracies = [10.0, 30.0, 20.0, 40.0]
    for renames in range(10):  # two are of the links, when they are made
        shutil.rmtree(here / "run", ignore_errors=True)
        (here / "run").mkdir()
        os.chdir(here / "run")
        left = [renames]

        def replace(source, target, left=left, original=os.replace):
            left[0] -= 1
            if left[0] == -1:
                raise KeyboardInterrupt  # as good as a kill: nothing is tidied up
            original(source, target)

        weights = {}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(checkpoint.os, "replace", replace)
            for _ in range(2):
                made = Made()
                if os.path.exists("checkpoint.pth.tar"):
                    made.state.resume("checkpoint.pth.tar")
                try:
                    while made.state.epoch < 4:
                        epoch = made.state.epoch + 1
                        made.change()
                        weights[epoch] = made.model.weight.detach().clone()
                        made.state.save(epoch, accuracies[epoch - 1])
                except KeyboardInterrupt:
                    best = here / "run/model_best.pth.tar"
                    if best.exists():  # right at once, even if nobody resumes
                        now = torch.load(best, weights_only=True)
                        tested = accuracies[:epoch]
                        written = tested if renames in (2, 3, 5, 8) else tested[:-1]
                        assert now["best"] == max(written)
        best = torch.load("model_best.pth.tar", weights_only=True)
        assert (best["epoch"], best["best"]) == (4, 40.0)
        assert torch.equal(best["model"]["weight"], weights[4])
        assert torch.load("checkpoint.pth.tar", weights_only=True)["epoch"] == 4
    os.chdir(here)


def other(name):
    """Make a file that is no checkpoint of a resnet18."""
    if name == "weights":
        torch.save(torch.nn.Linear(2, 1).state_dict(), "file")
    elif name == "text":
        Path("file").write_text("half a file")
    else:
        made = Made("resnet50" if "another" in name else "resnet18")
        made.state.save(9 if "complete" in name else 1, 1.0)
        os.rename("checkpoint.pth.tar", "file")
    if name in ("half", "damaged"):
        body = bytearray(Path("file").read_bytes())
        if name == "half":
            body = body[: len(body) // 2]
        elif name == "damaged":
            weights = made.model.weight.detach().numpy().tobytes()
            body[body.index(weights)] ^= 1
        Path("file").write_bytes(body)
    if name == "object":
        torch.save({"model": OSError("code")}, "file")


@pytest.mark.parametrize(
    "name, words",
    [
        ("none", "no file 'file': leave out --resume"),
        ("weights", "no checkpoint of this script"),
        ("text", "damaged"),
        ("half", "damaged"),
        ("damaged", "damaged"),
        ("object", "no checkpoint of this script"),
        ("another --arch", "type --arch resnet50$"),
        ("another that is complete", "type --arch resnet50$"),
        ("complete", "all its 9 epochs"),
    ],
)
def test_what_cannot_be_resumed_is_refused_and_left_as_it_is(name, words, here):
    if name != "none":
        other(name)
        before = (here / "file").read_bytes()
    with pytest.raises(UserError, match=words) as error:
        Made().state.resume("file")
    assert "\n" not in str(error.value)
    if name != "none":
        assert (here / "file").read_bytes() == before


def test_no_space(here):
    Made().state.save(1, 1.0)
    before = (here / "checkpoint.pth.tar").read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(UserError, match="cannot save") as error:
            Made().state.save(2, 0.0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "\n" not in str(error.value)
    assert (here / "checkpoint.pth.tar").read_bytes() == before


def test_the_scaler_goes_on_where_there_is_one(here):
    made = Made()
    made.state.scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    made.state.save(1, 1.0)
    again = Made()
    again.state.scaler = torch.amp.GradScaler("cpu")
    again.state.resume("checkpoint.pth.tar")
    assert again.state.scaler.get_scale() == 8.0
    Made().state.resume("checkpoint.pth.tar")  # a script without one does not mind
    made.state.scaler = torch.amp.GradScaler("cpu", enabled=False)
    made.state.save(1, 1.0)
    again.state.resume("checkpoint.pth.tar")  # bf16 had none: a new one
