"""Checkpoints: a killed and resumed run ends like an uninterrupted one."""

import os
import signal
import tempfile
import time
from argparse import Namespace
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from conftest import load as load_module
from conftest import raises_user_error
from run_ranks import Run

state = load_module("cinic_lab", "state")
random_states = load_module("cinic_lab", "random_states")
FILE = "checkpoint.pth.tar"
# 100 images: 5 steps of 24 in an epoch, the last smaller.
OPTIONS = "--epochs", 3, "--lr", 0.01, "--log-interval", 1, "--batch-size", 24


def load(folder=Path(), file=FILE):
    return torch.load(folder / file, weights_only=True)


def equal(a, b):
    """Return whether two checkpoints are equal to the bit."""
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return list(a) == list(b) and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(equal, a, b))
    return a == b


def same(folder, whole):
    """Return whether the last checkpoint equals that of an uninterrupted run."""
    return equal(load(folder) | {"options": whole["options"]}, whole)


def test_killed_and_resumed(sample, tmp_path):
    command = tmp_path, sample, "cinic_lab/cinic.py", *OPTIONS
    run = Run(*command)
    assert run.join() == [0], run.output()
    whole = load()
    killed = Run(*command)
    while "Epoch: [2][3/5]" not in killed.output():
        assert killed.alive(), killed.output()
        time.sleep(0.01)
    assert killed.kill() == [-signal.SIGKILL]
    run = Run(*command, "--resume", FILE)
    assert run.join() == [0], run.output()
    assert "Epoch: [2][1/5]" in run.output() and "Epoch: [1]" not in run.output()
    assert same(tmp_path, whole)


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    """Checkpoints are written to the working directory."""
    monkeypatch.chdir(tmp_path)


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

    def save(self, epoch, accuracy):
        """Add a random number to the weights, then save."""
        self.model.weight.data += torch.rand(1)
        self.state.epoch = epoch
        self.state.save(accuracy)


def test_every_rank_has_its_random_states_again(monkeypatch):
    other = [torch.Generator().manual_seed(5).get_state()]  # rank 1's
    monkeypatch.setattr(state, "gather_from_ranks", lambda own: [own, other])
    SmallRun().save(1, 50.0)
    first, second = torch.rand(3), torch.rand(3, generator=torch.manual_seed(5))
    for rank, expected in (0, first), (1, second), (2, None):  # it was not there
        monkeypatch.setattr(random_states, "get_rank", lambda rank=rank: rank)
        SmallRun().state.resume(FILE)
        found = torch.rand(3)
        known = [torch.equal(found, numbers) for numbers in (first, second)]
        assert known == [expected is first, expected is second]


@pytest.mark.parametrize("calls", range(18))  # so many has a run of four epochs
def test_a_kill_at_any_moment_keeps_the_best_model(calls, monkeypatch):
    """Killed in each torch.save() and at each rename, of files and of links."""

    def or_killed(call):
        def counted(*args):
            nonlocal calls
            calls -= 1
            if calls == -1:
                if call is save:
                    args[1].write(b"half")
                raise KeyboardInterrupt  # like a kill: nothing is cleaned up
            call(*args)

        return counted

    save = torch.save
    monkeypatch.setattr(torch, "save", or_killed(save))
    monkeypatch.setattr(Path, "replace", or_killed(Path.replace))
    for folder in ("logs/killed", "logs/resumed"):
        small = SmallRun(folder)
        if os.path.exists(FILE):
            small.state.resume(FILE)
        with suppress(KeyboardInterrupt):
            for epoch in range(small.state.epoch + 1, 5):
                small.save(epoch, {1: 10.0, 2: 30.0, 3: 20.0, 4: 25.0}[epoch])
    assert calls < 0 and load()["epoch"] == 4
    best = load(file=state.BEST)
    assert (best["epoch"], best["best_accuracy"]) == (2, 30.0)


def test_logs_may_be_a_link_to_another_disk():
    with tempfile.TemporaryDirectory(dir="/dev/shm") as disk:
        Path("logs").symlink_to(disk)
        SmallRun().save(1, 50.0)
        assert load(file=state.BEST)["epoch"] == 1


def test_a_checkpoint_that_does_not_fit():
    for name, value in (("arch", "resnet50"), ("epochs", 1), ("lr", 1), ("seed", 2)):
        SmallRun(**{name: value}).save(1, 1.0)
        with raises_user_error(f"use --{name} {value}$"):
            SmallRun().state.resume(FILE)
    SmallRun().save(9, 1.0)
    with raises_user_error("done all its epochs: leave out --resume"):
        SmallRun().state.resume(FILE)


def test_a_file_that_is_no_checkpoint():
    SmallRun().save(1, 1.0)
    Path("half").write_bytes(Path(FILE).read_bytes()[:-300])
    torch.save(load()["model"], "weights")
    for file in ("half", "weights", "none"):
        with raises_user_error(f"^{file} is not a checkpoint .*: use another$"):
            SmallRun().state.resume(file)


def test_a_full_disk_keeps_the_last_checkpoint():
    SmallRun().save(1, 1.0)
    Path("logs/run/checkpoint.part").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left"):
        SmallRun().save(2, 2.0)
    assert load()["epoch"] == load(file=state.BEST)["epoch"] == 1


def test_the_scaler_is_restored_if_enabled():
    def resumed(**scaler):
        small = SmallRun()
        small.state.scaler = torch.amp.GradScaler("cpu", **scaler)
        if os.path.exists(FILE):
            small.state.resume(FILE)
        return small

    resumed(init_scale=8.0).save(1, 1.0)
    assert resumed().state.scaler.get_scale() == 8.0
    resumed(enabled=False).save(2, 1.0)
    assert resumed(init_scale=4.0).state.scaler.get_scale() == 4.0  # bf16 had none
