"""The run scripts, as a student types them, with bash and without a GPU."""

import json
import re

import pytest
from conftest import EXERCISES, QUICK, REPOSITORY, draw, run

NAME = "pytorch_dvc_cnn_pretrained"


def results(room):
    return [json.loads(line) for line in (room / "logs/results.jsonl").open()]


@pytest.mark.parametrize(
    "launch, script, processes, batch",
    [
        ("run.sh", f"{NAME}.py", 1, 13),  # 40 images: the last batch has 1
        ("run-2gpus.sh", f"{NAME}_multigpu.py", 2, 19),  # 20 each: it has 1 too
        ("run.sh", f"{NAME}_largedata.py", 1, 25),
        ("run-2gpus.sh", f"{NAME}_largedata_multigpu.py", 2, 25),
        pytest.param(
            *("run-2nodes.sh", f"{NAME}_multigpu.py", 2, 25), marks=pytest.mark.slow
        ),
        ("run-2gpus.sh", "solutions/strong_scaling.py", 2, 12),
        ("run-2gpus.sh", "solutions/strong_scaling_largedata.py", 2, 12),
    ],
)
def test_a_run(launch, script, processes, batch, room, sample):
    strong = "strong" in script
    option = ["--batch-size", batch * processes if strong else batch]
    done = run(["bash", launch, script, *QUICK, *option], room, sample)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    core = "CPU core" if processes == 1 else "CPU cores"
    batches = f"{batch} per CPU core x {processes} {core} = {batch * processes}"
    assert f"Batch size: {batches}\n" in done.stdout
    train, test = (120, 40) if "largedata" in script else (40, 120)
    assert (
        f"train on: {train}\n" in done.stdout and f"test on: {test}\n" in done.stdout
    )
    assert "validate on: 20\n" in done.stdout
    for line in (
        r"Epoch 2: [\d.]+ s, .*train loss [\d.]+ accuracy [\d.]+ %; validation loss",
        r"Total training time: [\d.]+ s",
        r"Testing \(pretrained, before fine-tuning\): accuracy [\d.]+ %",
        r"Total fine-tuning time: [\d.]+ s",
        r"Testing \(pretrained, after fine-tuning\): accuracy [\d.]+ %",
    ):
        assert len(re.findall(f"^{line}", done.stdout, re.M)) == 1, line
    (result,) = results(room)  # written by one process alone
    assert result["gpus"] == processes and result["batch_per_gpu"] == batch
    assert result["images_per_epoch"] == train
    events = list((room / "logs").glob("*/events*"))
    assert len(events) == 1 and len(list((room / "logs").iterdir())) == 2


@pytest.mark.slow
def test_eight_processes_on_a_laptop(room, tmp_path):
    data = draw(tmp_path / "data", 0.02, ["exercise8"])
    script = f"{NAME}_multigpu.py"
    done = run(["bash", "run-8gpus.sh", script, *QUICK], room, data)
    assert done.returncode == 0, done.stderr
    assert results(room)[0]["gpus"] == 8


@pytest.mark.slow
def test_vgg16_and_another_working_directory(room, tmp_path):
    data = draw(tmp_path / "data", 0.01, ["exercise8"])
    options = ["--weights", "none", "--epochs", 1, "--finetune-epochs", 1]
    done = run(["bash", room / "run.sh", f"{NAME}.py", *options], "/", data)
    assert done.returncode == 0, done.stderr
    assert results(room)[0]["options"]["backbone"] == "vgg16"


@pytest.mark.slow
def test_training_learns_on_drawn_cats_and_dogs(room, tmp_path):
    data = draw(tmp_path / "data", 0.8, ["exercise8"])
    options = ["--backbone", "tinyvgg", "--epochs", 3, "--finetune-epochs", 0]
    done = run(["bash", "run-2gpus.sh", f"{NAME}_multigpu.py", *options], room, data)
    assert done.returncode == 0, done.stderr
    assert results(room)[0]["accuracy"] > 90


def test_script_names_and_arguments_may_hold_spaces(room, sample):
    (room / "my script.py").write_text("import sys; print(sys.argv[1:])")
    for launch in ("run.sh", "run-2gpus.sh"):
        done = run(["bash", launch, "my script.py", "a b", "*"], room, sample)
        assert "['a b', '*']" in done.stdout and done.returncode == 0


def test_a_failing_rank_ends_the_job_and_its_error_is_shown_once(room):
    (room / "fails.py").write_text(
        "import common.cli, torch, torch.distributed as dist\n"
        "dist.init_process_group()\n"
        "dist.all_reduce(torch.ones(1, device='cpu'))\n"
        "if dist.get_rank() == 1:\n"
        "    raise ValueError('this is it')\n"
        "dist.all_reduce(torch.ones(1, device='cpu'))\n"
    )
    done = run(["bash", "run-2gpus.sh", "fails.py"], room, timeout=60)
    assert done.returncode == 1
    assert done.stderr.count("Traceback") == 1
    assert done.stderr.count("this is it") == 2  # the line of code, and its error
    assert "peer" not in done.stderr and "torch/distributed" not in done.stderr


def test_a_killed_rank_ends_the_job(room):
    (room / "dies.py").write_text(
        "import common.cli, os, torch, torch.distributed as dist\n"
        "dist.init_process_group()\n"
        "if dist.get_rank() == 1:\n"
        "    os.kill(os.getpid(), 9)\n"
        "dist.all_reduce(torch.ones(1, device='cpu'))\n"
    )
    done = run(["bash", "run-2gpus.sh", "dies.py"], room, timeout=60)
    assert done.returncode == 137
    assert done.stderr == (
        "Error: rank 1 was ended by SIGKILL (mostly no memory is left)\n"
    )


@pytest.mark.parametrize(
    "script",
    sorted(f for e in EXERCISES for f in (REPOSITORY / e).glob("*.sh")),
    ids=lambda script: f"{script.parent.name}/{script.name}",
)
def test_run_scripts_are_portable(script):
    text, room = script.read_text(), script.parent.name
    assert "set -euo pipefail" in text and "source common/env.sh" in text
    for other in {*EXERCISES, "tests"} - {room}:  # as a job that is elsewhere
        done = run(["bash", script, "x.py"], REPOSITORY / other, SLURM_JOB_ID="1")
        assert done.returncode == 2
        assert done.stderr == f"Error: type cd {room} first\n" and done.stdout == ""
    assert not re.search(r"^# SBATCH|\$\*|SLURM_GPUS_PER_NODE", text, re.M)
    for site in ("account", "partition", "reservation"):
        assert not re.search(rf"^[^#].*--{site}|^#[^#].*--{site}", text, re.M)
