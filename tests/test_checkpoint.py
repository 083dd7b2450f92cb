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
from conftest import copy_exercise, raises_user_error
from conftest import load as load_module
from fork_ranks import Run

state = load_module("cinic_lab", "state")
random_states = load_module("cinic_lab", "random_states")
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
    exercise = copy_exercise("cinic_lab", tmp_path)
    command = exercise, sample, "cinic_lab/cinic.py", *OPTIONS
    run = Run(*command)
    assert run.join() == [0], run.output()
    whole = load(exercise)
    kill_in(Run(*command), "Epoch: [2][3/5]")
    run = Run(*command, "--resume", FILE)
    assert run.join() == [0], run.output()
    assert "Epoch: [2][1/5]" in run.output() and "Epoch: [1]" not in run.output()
    assert same(exercise, whole)


@pytest.mark.slow
def test_another_number_of_ranks(sample, tmp_path):
    exercise, resume = copy_exercise("cinic_lab", tmp_path), ("--resume", FILE)
    ddp = exercise, sample, "cinic_lab/cinic_ddp.py", *OPTIONS
    one = exercise, sample, "cinic_lab/cinic_tensorboard.py", *OPTIONS
    kill_in(Run(*ddp, ranks=2), "Epoch: [2]")
    kill_in(Run(*one, *resume), "Epoch: [3]")
    assert Run(*ddp, *resume, ranks=2).join() == [0, 0]
    assert load(exercise)["epoch"] == 3 and not equal(*load(exercise)["random"])


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


def test_random_states_are_restored(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    SmallRun().save(1, 50.0)
    expected = torch.rand(3)
    for rank in (0, 1):  # the second was not there
        monkeypatch.setattr(random_states, "get_rank", lambda rank=rank: rank)
        SmallRun().state.resume(FILE)
        assert torch.equal(torch.rand(3), expected) == (rank == 0)


def test_the_best_model_is_kept_after_a_kill_at_any_moment(tmp_path, monkeypatch):
    """Killed in each torch.save() and at each rename, of files and of links."""
    accuracies, best, left = [10.0, 30.0, 20.0], [], [-1]  # calls until the kill

    def killed_in(call, *args):
        left[0] -= 1
        if left[0] == -1:
            if call is save:
                args[1].write(b"half")
            raise KeyboardInterrupt  # like a kill: nothing is cleaned up
        call(*args)

    replace, save = Path.replace, torch.save
    monkeypatch.setattr(Path, "replace", lambda *args: killed_in(replace, *args))
    monkeypatch.setattr(torch, "save", lambda *args: killed_in(save, *args))
    while left[0] < 0:  # until a run ends before its kill
        left[0] = len(best)
        monkeypatch.chdir(tempfile.mkdtemp(dir=tmp_path))
        for folder in ("logs/1", "logs/2"):
            small = SmallRun(folder)
            if os.path.exists(FILE):
                small.state.resume(FILE)
            with suppress(KeyboardInterrupt):
                for epoch in range(small.state.epoch + 1, 4):
                    small.save(epoch, accuracies[epoch - 1])
        assert load(Path())["epoch"] == 3
        best.append(load(Path(), state.BEST))
    assert len(best) == 16  # of 15 calls, each was the last
    assert (best[0]["epoch"], best[0]["best_accuracy"]) == (2, 30.0)
    assert all(equal(content, best[0]) for content in best)


def test_checkpoints_where_logs_is_a_link_to_another_disk(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as other:
        if os.stat(other).st_dev == os.stat(tmp_path).st_dev:
            pytest.skip("/dev/shm is on the same disk")
        Path("logs").symlink_to(other)
        SmallRun("logs/run").save(1, 50.0)
        for file in (FILE, state.BEST):
            assert load(Path(), file)["epoch"] == 1
    assert {*os.listdir()} == {"logs", FILE, state.BEST}


def test_a_checkpoint_that_does_not_fit(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, value in (("arch", "resnet50"), ("epochs", 1), ("lr", 1), ("seed", 2)):
        SmallRun(**{name: value}).save(1, 1.0)
        with raises_user_error(f"use --{name} {value}$"):
            SmallRun().state.resume(FILE)
    SmallRun().save(9, 1.0)
    with raises_user_error("done all its epochs: leave out --resume"):
        SmallRun().state.resume(FILE)


def test_a_file_that_is_no_checkpoint(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    SmallRun().save(1, 1.0)
    whole, body = load(Path()), Path(FILE).read_bytes()
    weights = {f"module.{name}": value for name, value in whole["model"].items()}
    for other in (
        body[:-300],
        body[: len(body) // 2],
        b"",
        b"<html>sorry</html>",
        whole["model"],
        whole | {"model": weights},
        {name: whole[name] for name in whole if name != "options"},
        [1, 2],
    ):
        if isinstance(other, bytes):
            Path("other").write_bytes(other)
        else:
            torch.save(other, "other")
        with raises_user_error("^other is not a checkpoint of this script .*: use"):
            SmallRun().state.resume("other")
    with raises_user_error("^none is not a checkpoint.*No such file.*: use another"):
        SmallRun().state.resume("none")


def test_a_full_disk_keeps_the_last_checkpoint(tmp_path, monkeypatch):
    """An OSError, of which run() makes one line."""
    monkeypatch.chdir(tmp_path)
    SmallRun().save(1, 1.0)
    Path("logs/run/checkpoint.part").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left"):
        SmallRun().save(2, 2.0)
    assert load(Path())["epoch"] == load(Path(), state.BEST)["epoch"] == 1


def test_the_scaler_is_restored_if_enabled(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

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
