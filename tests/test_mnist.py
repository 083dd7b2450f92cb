"""mnist_multigpu/: run scripts, profiles, the skeleton, model, data."""

import json
import re
import sys
from argparse import Namespace

import pytest
import torch
from conftest import REPOSITORY, copy_exercise, load, run, slow
from torch import nn
from torch.nn import functional as F

QUICK = ("--epochs", "1", "--batch-size", "64", "--log-interval", "3")


@pytest.fixture
def exercise(tmp_path):
    return copy_exercise("mnist_multigpu", tmp_path)


def check(done, exercise, processes, batches):
    """Check what a run on 600 digits, tested on 100, printed and left."""
    assert done.returncode == 0 and "Warning" not in done.stderr, done.stderr
    for line in (
        "Running on hosts? .+",
        "Train set size: 600",
        "Test set size: 100",
        f"mnist_(singlegpu|multigpu|ddp) on {processes} x CPU core",
        r"Test set: Average loss: [\d.]+, Accuracy: (\d+)/100 \(\1 %\)",
        r"Total training time: [\d.]+ s",
    ):
        # The other rank's profiler may print its lines without newlines.
        line = rf"(?:^|\.txt|\.lprof|run:|-rtmz){line}$"
        assert len(re.findall(line, done.stdout, re.M)) == 1, line
    shown = re.findall(r"^Train Epoch: 1 \[(.*)\]\tLoss: \d", done.stdout, re.M)
    steps = [*range(3, batches, 3), batches]  # each log interval, and the last
    seen = [min(600, 64 * processes * step) for step in steps]
    assert shown == [f"{n}/600 ({n / 600:.0%})" for n in seen] and seen[-1] == 600
    (result,) = map(json.loads, (exercise / "logs/results.jsonl").open())
    assert result["gpus"] == processes


def test_one_gpu(exercise, sample):
    done = run(["bash", "slurm_singlegpu.sh", *QUICK], exercise, sample)
    check(done, exercise, 1, 10)
    assert not (exercise / "mnist_cnn.pt").exists()


@pytest.mark.parametrize("script", ["singlegpu", "multigpu"])
def test_the_course_command_and_its_profile(script, exercise, sample):
    """The run script leaves a profile, which the README's command shows."""
    done = run(["bash", f"slurm_{script}.sh"], exercise, sample)
    assert done.returncode == 0, done.stderr
    assert len(re.findall(r"^Test set: ", done.stdout, re.M)) == 5
    (result,) = map(json.loads, (exercise / "logs/results.jsonl").open())
    assert result["options"]["batch_size"] == 128 and len(result["epoch_ends"]) == 5
    assert result["profiled"]  # compare.py keeps such runs apart
    typed = r"^python (-m line_profiler -rmt \S+)$"
    (command,) = re.findall(typed, done.stdout, re.M)
    shown = run([sys.executable, *command.split()], exercise).stdout
    for line in (
        f"File: mnist_{script}.py",
        r"Function: train at line \d+",
        r"Function: test at line \d+",
        r"Line #  +Hits  +Time  Per Hit  +% Time  Line Contents",
        r" +\d+ +25 .* loss.backward\(\)",  # 5 epochs of 5 batches
    ):
        assert re.search(f"^{line}$", shown, re.M), line


def test_the_skeleton_is_the_run_script_with_gaps():
    folder = REPOSITORY / "mnist_multigpu"
    whole, skeleton = (
        [line for line in (folder / name).read_text().splitlines() if line]
        for name in ("slurm_multigpu.sh", "slurm_skeleton.txt")
    )
    gaps = [line for line in skeleton if line.startswith("# MISSING: ")]
    given = [line for line in skeleton if line not in gaps]
    assert len(gaps) == 5 and [line for line in whole if line in given] == given
    missing = " ".join(line for line in whole if line not in given)
    for word in ("--ntasks=", "--cpus-per-task=", "--gres=", "--time=", "kernprof"):
        assert word in missing


@pytest.mark.parametrize("launch", ["slurm_ddp.sh", slow("slurm_ddp_2nodes.sh")])
def test_ddp_and_a_profile_of_each_rank(launch, exercise, sample):
    command = ["bash", launch, *QUICK, "--save-model"]
    done = run(command, exercise, sample)
    check(done, exercise, 2, 5)
    for rank in (0, 1):
        assert "train at line" in (exercise / f"logs/rank{rank}.txt").read_text()
        assert (exercise / f"logs/rank{rank}.lprof").exists()
    model = load("mnist_multigpu", "mnist_singlegpu").Net()
    model.load_state_dict(torch.load(exercise / "mnist_cnn.pt"))


def test_optimizers_and_schedules():
    module = load("mnist_multigpu", "mnist_singlegpu")
    layer = nn.Linear(2, 1)
    for name, optimizer in module.OPTIMIZERS.items():
        assert optimizer.__name__.lower() == name
        usual = 1.0 if name == "adadelta" else 0.001
        assert module.LEARNING_RATES[name] == usual
    args, rates = Namespace(gamma=0.7, epochs=4), {}
    for name, make in module.SCHEDULERS.items():
        optimizer = torch.optim.SGD(layer.parameters(), 1.0)
        schedule = make(optimizer, args)
        optimizer.step()
        schedule.step()
        rates[name] = optimizer.param_groups[0]["lr"]
    expected = {"step": 0.7, "exponential": 0.7, "cosine": 0.853553}
    assert rates == pytest.approx(expected, abs=1e-5)


def test_the_model_equals_the_courses():
    """It pools before ReLU, which gives the same result."""
    torch.manual_seed(0)
    model = load("mnist_multigpu", "mnist_singlegpu").Net().eval()
    images = torch.randn(4, 1, 28, 28)
    x = F.relu(model.conv2(F.relu(model.conv1(images))))
    x = model.fc2(F.relu(model.fc1(F.max_pool2d(x, 2).flatten(1))))
    torch.testing.assert_close(model(images), F.log_softmax(x, dim=1))
    assert not torch.equal(model.train()(images), model.eval()(images))
