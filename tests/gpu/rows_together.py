"""Rows of `make test-gpu` that may run side by side.

`make test` does not collect them, as their files' names do not begin with test_.
"""

import fcntl
import importlib.util
import json
import os
import re
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from gpu.jobs import Job, run_recorded
from gpu.recorder import record

from common.data import REPOSITORY
from tools.pairs import PAIRS

INTRO = "--layers 4 --width 64 --heads 4 --length 32 --sequences 256 --epochs 2"
INTRO += " --batch-size 8 --lr 0.003"
SMALL = {
    "exercise8": "--backbone tinyvgg --epochs 1 --finetune-epochs 1 --batch-size 10",
    "mnist_multigpu": "--epochs 1 --batch-size 64",
    # With 10 steps each would report, which waits for the GPU.
    "cifar100_demo": "--epochs 1 --arch resnet18 --image-size 40 --batch-size 16 "
    "--steps 30 --no-profile",
    "cinic_lab": "--epochs 1 --batch-size 50 --lr 0.003",
    "dp_ddp_intro": INTRO,
    "beyond_ddp": INTRO,
}
CNN = "exercise8", "mnist_multigpu", "cifar100_demo", "cinic_lab"
MIXED_PRECISION = {"cifar100_demo": ["--amp"], "cinic_lab": []}  # options for it
# TF32 rounds to three digits, which BatchNorm makes 1 % in two steps.
NO_TF32 = {"NVIDIA_TF32_OVERRIDE": "0"}
# One of each exercise and kind, for CPU cores.
FEW = [
    "cifar100_demo/train_cifar100.py",
    "mnist_multigpu/mnist_ddp.py",
    "cinic_lab/cinic_dp.py",
    "beyond_ddp/fsdp.py",
]
PATIENTS = [
    f"clinic/{folder}patient{number}.py"
    for number in range(1, 13)
    for folder in ("", "solutions/")
]

# A CPU's losses: a GPU's machine need not train on its CPU, and a changed script
# does not agree with itself.
LOSSES = Path(__file__).with_name("losses.json")
# Of the last loss of a transformer, which draws nothing on the GPU: it was a CPU's
# within 0.1 % on an H200, with TF32 as well. And of a CNN's first training losses.
TOLERANCE = 0.005
# Of a CNN's last losses of the evaluation: Adadelta, too, multiplies what rounding
# has changed.
EVALUATION_TOLERANCE = 0.02
BATCHES = 3  # whose losses are compared
# Of the first loss, before rounding has changed a weight.
SIXTEEN_BITS_TOLERANCE = 0.03
RESUMED_TOLERANCE = 0.05


def check(found, expected, tolerance):
    """Compare losses; return the largest relative distance."""
    assert found == pytest.approx(expected, rel=tolerance)
    pairs = zip(found, expected, strict=True)
    return max(round(abs(a - b) / b, 6) for a, b in pairs)


def compare(run, expected):
    """Compare a run's losses with a CPU's; return the largest distance."""
    if "ranks" not in run:
        assert len(run["printed"]) == len(expected["printed"])
        return check(run["printed"][-1:], expected["printed"][-1:], TOLERANCE)
    weights = {rank["weights"] for rank in run["ranks"]}
    assert len(weights) == 1, "the ranks' weights differ after the last step"
    distances = []
    parts = ("training", TOLERANCE), ("evaluation", EVALUATION_TOLERANCE)
    for rank, wanted in zip(run["ranks"], expected["ranks"], strict=True):
        found = shorten(rank)
        distances += [check(found[part], wanted[part], far) for part, far in parts]
    return max(distances)


def shorten(rank):
    """Return what is compared of a rank's losses."""
    training, evaluation = rank["training"], rank["evaluation"]
    return {"training": training[:BATCHES], "evaluation": evaluation[-BATCHES:]}


def save_losses(script, run):
    """Write the losses that compare() expects, a line for each script."""
    new = {"printed": run["printed"]}
    if "ranks" in run:
        new = {"ranks": [shorten(rank) for rank in run["ranks"]]}
    with LOSSES.open("r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # other rows write as well
        losses = json.load(file) | {script: new}
        lines = [f'"{name}": {json.dumps(losses[name])}' for name in sorted(losses)]
        file.seek(0)
        file.truncate()
        file.write("{\n" + ",\n".join(lines) + "\n}\n")


def list_scripts():
    """Return the training scripts of the pairs that can run here."""
    scripts = dict.fromkeys(script for pair in PAIRS for script in pair[:2])
    has_wandb = importlib.util.find_spec("wandb")
    return [
        script
        for script in scripts
        if script.partition("/")[0] in SMALL
        and "tensorflow" not in script
        and (has_wandb or "wandb" not in script)
    ]


def mark_few(values, few):
    return [
        pytest.param(value, marks=pytest.mark.few) if value in few else value
        for value in values
    ]


@pytest.mark.timeout(600)  # it may train twice
@pytest.mark.parametrize("script", mark_few(list_scripts(), FEW))
def test_training_script(script, tmp_path, record_property):
    """A few steps have the losses of a CPU, and no step waits for the GPU."""
    exercise = script.partition("/")[0]
    text, cnn = (REPOSITORY / script).read_text(), exercise in CNN
    options = SMALL[exercise].split()
    gpus = torch.accelerator.device_count()
    splits = "nn.DataParallel" in text and gpus > 1
    if splits and not cnn:  # the same batch as on one GPU
        batch = int(re.search(r"--batch-size (\d+)", SMALL[exercise])[1])
        options.append(f"--batch-size={batch // gpus}")
    mixed = cnn and '"--dtype"' in text
    precision = ["--dtype=fp32"] if mixed else []
    env = NO_TF32 if cnn else {}
    run = run_recorded(tmp_path / "run", script, [*options, *precision], cnn, **env)
    record_property("run", run)
    if os.environ.get("RECORD"):
        save_losses(script, run)
        return
    if splits and cnn:
        note = "BatchNorm sees a part of the batch on each GPU"
        record_property("not_compared", note)
    else:
        losses = json.loads(LOSSES.read_text())
        assert script in losses, "record its losses on a CPU: RECORD=1 make test-gpu"
        record_property("far_from_cpu", compare(run, losses[script]))
    if mixed and gpus:
        options += MIXED_PRECISION[exercise]
        mixed_run = run_recorded(tmp_path / "mixed", script, options, cnn)
        record_property("mixed", mixed_run)
        if not splits:
            first = mixed_run["ranks"][0]["training"][:1]
            check(first, run["ranks"][0]["training"][:1], SIXTEEN_BITS_TOLERANCE)


@pytest.mark.few
@pytest.mark.timeout(720)  # it trains three times
def test_killed_run_is_resumed(tmp_path, record_property):
    """A run that is killed after its first checkpoint continues with its losses."""
    script, name = "cinic_lab/cinic.py", "checkpoint.pth.tar"
    # Enough epochs that the kill comes before the end, however fast the GPU is.
    options = [*SMALL["cinic_lab"].split(), "--epochs=4"]
    how = {"patch": partial(record, draw_on_cpu=True, freeze=True), **NO_TF32}
    with Job(tmp_path / "whole", script, *options, **how) as whole:
        whole.wait()
        steps = whole.records()[0]["training"]
    with Job(tmp_path / "killed", script, *options, **how) as killed:
        checkpoint = killed.folder / name
        while killed.alive() and not checkpoint.exists():
            time.sleep(0.01)
        killed.kill()
    options.append(f"--resume={checkpoint}")
    with Job(tmp_path / "resumed", script, *options, **how) as resumed:
        resumed.wait()
        rest = resumed.records()[0]["training"]
    record_property("losses", rest)
    record_property("losses_without_kill", steps)
    assert 0 < len(rest) < len(steps)
    check(rest[:1], steps[-len(rest) :][:1], RESUMED_TOLERANCE)


@pytest.mark.parametrize("script", mark_few(PATIENTS, PATIENTS[:2]))
def test_checkup(script, tmp_path, record_property):
    """It reports the bug of each patient, and none in a solution."""
    healthy = "solutions" in script or "patient5" in script  # 5 needs two nodes
    options = "--strict", "--hang-timeout=30", REPOSITORY / script
    with Job(tmp_path / "run", "checkup/__main__.py", *options, ranks=2) as job:
        record_property("output", job.wait(expected=0 if healthy else 1))


@pytest.mark.few
def test_dp_uses_all_gpus(tmp_path):
    """DataParallel gives each GPU its part of a batch."""
    options = [*INTRO.split(), "--epochs=1", "--verbose"]
    with Job(tmp_path / "run", "dp_ddp_intro/dp.py", *options) as job:
        output = job.wait()
    kind = torch.accelerator.current_accelerator()
    gpus = [f"{kind}:{i}" for i in range(torch.accelerator.device_count())]
    for device in gpus or ["cpu"]:
        assert f"Hello from {device} with input size (8, 32)" in output
