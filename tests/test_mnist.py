"""mnist_multigpu/: what its run scripts print and leave, and the skeleton."""

import json
import re
import sys

import pytest
import torch
from conftest import REPOSITORY, copy_exercise, load, run, slow

QUICK = ("--epochs", "1", "--batch-size", "64", "--log-interval", "3")


@pytest.fixture
def exercise(tmp_path):
    return copy_exercise("mnist_multigpu", tmp_path)


@pytest.mark.parametrize("script", ["singlegpu", "multigpu"])
def test_the_course_command_and_its_profile(script, exercise, sample):
    """The run script leaves a profile, which the README's command shows."""
    done = run(["bash", f"slurm_{script}.sh"], exercise, sample)
    assert done.returncode == 0, done.stderr
    assert len(re.findall(r"^Test set: ", done.stdout, re.M)) == 5
    (result,) = map(json.loads, (exercise / "logs/results.jsonl").open())
    assert result["options"]["batch_size"] == 128 and len(result["epoch_ends"]) == 5
    assert result["profiled"]  # compare.py keeps such runs apart
    assert not (exercise / "mnist_cnn.pt").exists()
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


@pytest.mark.parametrize("launch", ["slurm_ddp.sh", slow("slurm_ddp_2nodes.sh")])
def test_ddp_and_a_profile_of_every_rank(launch, exercise, sample):
    """On 600 digits, 128 in a step, tested on 100."""
    command = ["bash", launch, *QUICK, "--save-model"]
    done = run(command, exercise, sample)
    assert done.returncode == 0 and "Warning" not in done.stderr, done.stderr
    for line in (
        "Running on hosts? .+",
        "Train set size: 600",
        "Test set size: 100",
        "mnist_ddp on 2 x CPU core",
        r"Train Epoch: 1 \[384/600 \(64%\)\]\tLoss: [\d.]+",
        r"Train Epoch: 1 \[600/600 \(100%\)\]\tLoss: [\d.]+",  # also the last step
        r"Test set: Average loss: [\d.]+, Accuracy: (\d+)/100 \(\1 %\)",
        r"Total training time: [\d.]+ s",
    ):
        # The other rank's profiler may print its lines without newlines.
        line = rf"(?:^|\.txt|\.lprof|run:|-rtmz){line}$"
        assert len(re.findall(line, done.stdout, re.M)) == 1, line
    (result,) = map(json.loads, (exercise / "logs/results.jsonl").open())
    assert result["gpus"] == 2
    for rank in (0, 1):
        assert "train at line" in (exercise / f"logs/rank{rank}.txt").read_text()
        assert (exercise / f"logs/rank{rank}.lprof").exists()
    model = load("mnist_multigpu", "mnist_singlegpu").Net()
    model.load_state_dict(torch.load(exercise / "mnist_cnn.pt"))
