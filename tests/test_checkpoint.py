"""Checkpoints: a killed and resumed run ends like an uninterrupted one."""

import os
import resource
import signal
import time
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from conftest import copy_exercise, raises_user_error
from conftest import load as load_module
from fork_ranks import Run

from common import checkpoint

state = load_module("cinic_lab", "state")
FILE = "checkpoint.pth.tar"
# 100 images: 5 steps of 24 in an epoch, the last smaller.
OPTIONS = "--epochs", 3, "--lr", 0.01, "--log-interval", 1, "--batch-size", 24


def load(exercise, file=FILE):
    return torch.load(exercise / file, weights_only=True)


def equal(a, b):
    """Return whether two checkpoints are equal to the bit."""
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return list(a) == list(b) and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(equal, a, b))
    return a == b


def same(exercise, whole):
    """Return whether the last checkpoint equals that of an uninterrupted run."""
    return equal(load(exercise) | {"options": whole["options"]}, whole)


def kill_in(run, line):
    deadline = time.monotonic() + 120
    while line not in run.output():
        assert time.monotonic() < deadline and run.alive(), run.output()
        time.sleep(0.01)
    assert set(run.kill()) == {-signal.SIGKILL}


def test_killed_and_resumed(sample, tmp_path):
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
    exercise = copy_exercise("cinic_lab", tmp_path / "whole")
    run = Run(exercise, sample, "cinic_lab/cinic.py", *OPTIONS)
    assert run.join() == [0], run.output()
    whole = load(exercise)
    assert not any(key.startswith("module.") for key in whole["model"])
    exercise = copy_exercise("cinic_lab", tmp_path / "killed")
    kill_in(Run(exercise, sample, "cinic_lab/cinic.py", *OPTIONS), "Epoch: [2][3/5]")
    run = Run(exercise, sample, "cinic_lab/cinic.py", *OPTIONS, "--resume", FILE)
    assert run.join() == [0], run.output()
    assert "Epoch: [2][1/5]" in run.output() and "Epoch: [1]" not in run.output()
    assert same(exercise, whole) and not list(exercise.glob("*.part"))


@pytest.mark.slow
def test_another_number_of_ranks(sample, tmp_path):
    """From two to one, and back to two."""
    exercise = copy_exercise("cinic_lab", tmp_path)
    kill_in(
        Run(exercise, sample, "cinic_lab/cinic_ddp.py", *OPTIONS, ranks=2),
        "Epoch: [2]",
    )
    states, resume = [load(exercise)["random"]], [*OPTIONS, "--resume", FILE]
    kill_in(
        Run(exercise, sample, "cinic_lab/cinic_tensorboard.py", *resume),
        "Epoch: [3]",
    )
    states.append(load(exercise)["random"])
    run = Run(exercise, sample, "cinic_lab/cinic_ddp.py", *resume, ranks=2)
    assert run.join() == [0, 0], run.output()
    states.append(load(exercise)["random"])
    assert [len(random) for random in states] == [2, 1, 2]
    assert load(exercise)["epoch"] == 3 and not equal(*states[2])


class SmallRun:
    """A TrainingState of a small model."""

    def __init__(self, folder="logs/run", **options):
        torch.manual_seed(3)
        self.model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(self.model.parameters(), 0.1, 0.9)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 9)
        args = {"arch": "resnet18", "epochs": 9, "lr": 0.1, "seed": 1, **options}
        parts = self.model, optimizer, scheduler, torch.device("cpu")
        self.state = state.TrainingState(Namespace(**args), *parts, folder)

    def change(self):
        """Add a random number to the weights."""
        with torch.no_grad():
            self.model.weight += torch.rand(1)


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_random_states_are_restored(here):
    small = SmallRun()
    torch.rand(1000)
    small.state.save(1, 50.0)
    expected = torch.rand(3)
    for rank in (0, 1):  # the second was not there
        again = SmallRun()
        again.state.rank = rank
        again.state.resume(FILE)
        assert torch.equal(torch.rand(3), expected) == (rank == 0)
        assert (again.state.epoch, again.state.best) == (1, 50.0)


def test_the_best_model_is_right_after_a_kill_between_the_files(here):
    """It is killed at each rename, of files and of links, and resumed."""
    accuracies, found = [10.0, 30.0, 20.0], []
    for renames in range(12):
        (here / f"{renames}").mkdir()
        os.chdir(here / f"{renames}")
        left = [renames]

        def replace(source, target, left=left, original=os.replace):
            left[0] -= 1
            if left[0] == -1:
                raise KeyboardInterrupt  # like a kill: nothing is cleaned up
            original(source, target)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(checkpoint.os, "replace", replace)
            for _ in range(2):
                small = SmallRun()
                if os.path.exists(FILE):
                    small.state.resume(FILE)
                try:
                    while small.state.epoch < 3:
                        small.change()
                        small.state.save(
                            small.state.epoch + 1, accuracies[small.state.epoch]
                        )
                except KeyboardInterrupt:
                    continue
        assert load(Path())["epoch"] == 3
        found.append(load(Path(), state.TrainingState.BEST))
    os.chdir(here)
    assert left[0] > 0  # the last run was not killed
    assert (found[-1]["epoch"], found[-1]["best"]) == (2, 30.0)
    assert all(equal(best["model"], found[-1]["model"]) for best in found)


DAMAGED = "damaged, or not a checkpoint of this script"
SAVED = "--arch resnet50 --epochs 9 --lr 0.1 --seed 1$"


@pytest.mark.parametrize(
    "words, change",
    [
        (DAMAGED, dict.clear),
        (DAMAGED, lambda content: content.pop("model")),
        (DAMAGED, lambda content: content.pop("random")),
        (DAMAGED, lambda content: content.update(best="text")),
        (DAMAGED, lambda content: content.update(options=None)),
        (DAMAGED, lambda content: content["options"].pop("lr")),
        (DAMAGED, lambda content: content.update(model=Namespace())),
        (SAVED, lambda content: content["options"].update(arch="resnet50")),
        ("--lr 0.2 --seed 1$", lambda content: content["options"].update(lr=0.2)),
        ("--seed 2$", lambda content: content["options"].update(seed=2)),
        ("--epochs 12 ", lambda content: content["options"].update(epochs=12)),
        ("done all 9 epochs", lambda content: content.update(epoch=9)),
        ("done all 10 epochs", lambda content: content.update(epoch=10)),
    ],
)
def test_a_checkpoint_that_does_not_fit(words, change, here):
    SmallRun().state.save(1, 1.0)
    content = load(here)
    change(content)
    torch.save(content, FILE)
    refused(words)


@pytest.mark.parametrize("damage", ["none", "text", "half", "a bit"])
def test_a_damaged_file(damage, here):
    small = SmallRun()
    small.state.save(1, 1.0)
    body = bytearray(Path(FILE).read_bytes())
    weights = small.model.weight.detach().numpy().tobytes()
    if damage == "none":
        Path(FILE).unlink()
        return refused(f"^no file '{FILE}': leave out --resume")
    if damage == "text":
        body = b"half a file"
    elif damage == "half":
        body = body[: len(body) // 2]
    else:
        body[body.index(weights)] ^= 1
    Path(FILE).write_bytes(body)
    refused(DAMAGED)


def test_nodes_with_different_files(here, monkeypatch):
    SmallRun().state.save(1, 1.0)
    monkeypatch.setattr(state, "gather_from_ranks", lambda value: [value, "other"])
    refused("differs between the nodes")


def refused(words):
    """Check that --resume prints one line and leaves the state unchanged."""
    small = SmallRun()
    before = small.model.weight.clone()
    with raises_user_error(words):
        small.state.resume(FILE)
    assert torch.equal(small.model.weight, before) and small.state.epoch == 0


def test_no_space(here):
    SmallRun().state.save(1, 1.0)
    before = [file.read_bytes() for file in here.glob("*.tar")]
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with raises_user_error("cannot save"):
            SmallRun().state.save(2, 0.0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [file.read_bytes() for file in here.glob("*.tar")] == before
    assert len(before) == 2 and not list(here.rglob("*.part"))


def test_the_scaler_is_restored_if_enabled(here):
    def resumed(**scaler):
        small = SmallRun()
        small.state.scaler = torch.amp.GradScaler("cpu", **scaler)
        if os.path.exists(FILE):
            small.state.resume(FILE)
        return small.state

    resumed(init_scale=8.0).save(1, 1.0)
    assert resumed().scaler.get_scale() == 8.0
    resumed(enabled=False).save(2, 1.0)
    assert resumed(init_scale=4.0).scaler.get_scale() == 4.0  # bf16 had none
