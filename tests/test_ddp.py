"""What DDP promises, with real processes that talk through Gloo."""

import sys
from itertools import chain

import pytest
import torch
from conftest import QUICK, REPOSITORY, draw, run, torchrun

PLAIN = REPOSITORY / "exercise8/pytorch_dvc_cnn_pretrained.py"
DDP = REPOSITORY / "exercise8/pytorch_dvc_cnn_pretrained_multigpu.py"
SPY = REPOSITORY / "tests/spy.py"


def load(folder, processes):
    return [torch.load(folder / f"{rank}.pt") for rank in range(processes)]


@pytest.fixture(scope="module")
def dry_runs(tmp_path_factory):
    """What 1 and 3 processes saw in 3 epochs of 100 images, and 50 to validate."""
    data = draw(tmp_path_factory.mktemp("data"), 0.251, ["exercise8"])
    one, three = tmp_path_factory.mktemp("one"), tmp_path_factory.mktemp("three")
    (one / "common").symlink_to(REPOSITORY / "common")
    (three / "common").symlink_to(REPOSITORY / "common")
    options = ["--backbone", "tinyvgg", "--epochs", 2, "--finetune-epochs", 1]
    done = run([sys.executable, SPY, one, "dry", PLAIN, *options], one, data)
    assert done.returncode == 0, done.stderr
    done = torchrun(3, [SPY, three, "dry", DDP, *options], three, data)
    assert done.returncode == 0, done.stderr
    return load(one, 1)[0], load(three, 3)


def test_evaluation_of_three_processes_is_that_of_one(dry_runs):
    one, three = dry_runs
    sizes = [50, 50, 302, 50, 302]  # two epochs, a test, an epoch, a test
    for i, size in enumerate(sizes):
        shares = [seen["evaluated"][i][0] for seen in three]
        assert sorted(chain(*shares)) == list(
            range(size)
        )  # each once, though 3 * 16 < 50
        for seen in three:
            result, alone = seen["evaluated"][i][1], one["evaluated"][i][1]
            assert result["accuracy"] == alone["accuracy"]
            assert result["loss"] == pytest.approx(alone["loss"], rel=1e-5)
    assert 0 < one["evaluated"][0][1]["accuracy"] < 100


def test_epochs_differ_in_order_and_ranks_share_the_images(dry_runs):
    _, three = dry_runs
    epochs = list(zip(*(seen["orders"] for seen in three), strict=True))
    assert len(epochs) == 3
    for shares in epochs:
        assert set(chain(*shares)) == set(range(100))
        assert [len(share) for share in shares] == [
            34
        ] * 3  # 100 images and two repeated
    assert len({tuple(shares[0]) for shares in epochs}) == 3


def test_each_rank_augments_differently(dry_runs):
    _, three = dry_runs
    assert len({draws for seen in three for draws in seen["random"]}) == 9


def test_replicas_are_equal_to_the_bit_after_fine_tuning(sample, tmp_path):
    (tmp_path / "common").symlink_to(REPOSITORY / "common")
    done = torchrun(2, [SPY, tmp_path, "real", DDP, *QUICK], tmp_path, sample)
    assert done.returncode == 0, done.stderr
    first, second = load(tmp_path, 2)
    for name, value in first["after"].items():
        assert torch.equal(value, second["after"][name]), name
    for name, value in first["before"].items():
        last_block = int(name.split(".")[0]) >= 24
        changed = not torch.equal(value, first["after"][f"features.{name}"])
        assert changed == last_block, name


def test_two_halves_of_a_batch_train_like_the_whole(tmp_path):
    worker = REPOSITORY / "tests/halves.py"
    (tmp_path / "common").symlink_to(REPOSITORY / "common")
    assert run([sys.executable, worker, PLAIN], tmp_path).returncode == 0
    done = torchrun(2, [worker, DDP], tmp_path)
    assert done.returncode == 0, done.stderr
    whole, halves = torch.load(tmp_path / "1.pt"), torch.load(tmp_path / "2.pt")
    for name, value in whole["after"].items():
        torch.testing.assert_close(halves["after"][name], value, rtol=0, atol=1e-5)
    moved = (
        whole["after"]["features.28.weight"] - whole["before"]["features.28.weight"]
    )
    assert moved.abs().max() > 1e-4
    for key in ("loss", "accuracy"):
        assert halves["means"][key] == pytest.approx(whole["means"][key], rel=1e-5)


LEAVES = """
import sys
import common.cli, torch, torch.distributed as dist

dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(10, 10))
model(torch.zeros(2, 10)).sum().backward()
sys.setswitchinterval(5)  # no thread gets a turn unless Python waits
sums = torch.zeros(3, device="cpu")
works = [dist.all_reduce(sums.clone(), async_op=True) for _ in range(200)]
[work.wait() for work in works]
del works
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_a_process_ends_without_accident(tmp_path):
    """Gloo's threads free tensors after it has; without a pause a third aborted."""
    (tmp_path / "common").symlink_to(REPOSITORY / "common")
    (tmp_path / "leaves.py").write_text(LEAVES)
    for _ in range(6):
        done = torchrun(2, ["leaves.py"], tmp_path)
        assert done.returncode == 0, done.stderr
