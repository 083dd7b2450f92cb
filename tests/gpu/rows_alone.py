"""Rows of `make test-gpu` that measure a speed or fill the memory: one at a time."""

import gzip
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from gpu.jobs import Job, ranks_of, run_recorded
from gpu.rows_together import mark_few

from bench import BENCH, launches, run_check
from common.data import REPOSITORY
from tools.machine import REQUIRED_FILES

# At full size: the exercise, its scripts for one GPU and for all, and options.
VGG16 = [f"pytorch_dvc_cnn_pretrained{end}.py" for end in ("", "_multigpu")]
RESNET = "train_cifar100.py", "train_ddp_cifar100.py", "--batch-size 32 --steps 30"
FULL = {
    "MNIST": ("mnist_multigpu", "mnist_singlegpu.py", "mnist_ddp.py", ""),
    "ResNet-152": ("cifar100_demo", *RESNET),
    "VGG16": ("exercise8", *VGG16, "--finetune-epochs 2 --weights none"),
}


def call(command, folder):
    """Run a command in a folder; return its output."""
    pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen([*map(str, command)], cwd=folder, **pipe) as job:
        try:
            output, _ = job.communicate()
        finally:
            job.terminate()  # torchrun then ends its ranks
    assert job.returncode == 0, output
    return output


def test_check(record_property):
    """check.py finishes; its results say what the machine is."""
    record_property("found", run_check())


@pytest.mark.few
def test_bubble(tmp_path, record_property):
    """measure_bubble.py runs on two ranks."""
    gpus = torch.accelerator.device_count()
    options = [] if gpus else ["--width=64", "--length=32"]
    script = "beyond_ddp/measure_bubble.py"
    with Job(tmp_path / "run", script, *options, ranks=2) as job:
        record_property("output", job.wait())


@pytest.mark.few
@pytest.mark.parametrize("name", ["train_cifar100", "train_ddp_cifar100"])
def test_trace(name, tmp_path):
    """Save the profiler's trace of a training script in ten steps."""
    script = f"cifar100_demo/{name}.py"
    # The data have more than the ten steps that the profiler needs.
    options = ["--epochs=1", "--steps=10", "--arch=resnet50", "--batch-size=32"]
    if not torch.accelerator.device_count():
        options += ["--image-size=40", "--arch=resnet18"]
    with Job(tmp_path / "run", script, *options, ranks=ranks_of(script)) as job:
        job.wait()
    trace, *_ = sorted((job.folder / "logs/profiler").iterdir())
    file = Path(os.environ["RESULTS"], f"trace-{name}.json.gz")
    file.write_bytes(gzip.compress(trace.read_bytes()))


@pytest.mark.timeout(900)  # it makes data and may train twice
@pytest.mark.parametrize("name", FULL)
def test_full_size(name, tmp_path, record_property, monkeypatch):
    """Train on one GPU and, if there are several, on all; sample the GPU's power."""
    exercise, one, all_gpus, options = FULL[name]
    monkeypatch.setenv("DATADIR", str(tmp_path / "data"))
    make_data = [sys.executable, "sample_data.py", "--scale=2", "--to"]
    call([*make_data, os.environ["DATADIR"]], REPOSITORY / exercise)
    options = ["--epochs=2", *options.split()]
    # Ranks that share a GPU are no faster.
    scripts = [one, all_gpus] if torch.accelerator.device_count() > 1 else [one]
    samples = Path(os.environ["RESULTS"], f"utilisation-{name}.csv")
    monitor = [sys.executable, "monitor_gpus.py", samples, str(os.getpid())]
    with subprocess.Popen(monitor, cwd=REPOSITORY / "cifar100_demo") as sampling:
        try:
            for script in scripts:
                folder = tmp_path / Path(script).stem
                run = run_recorded(folder, f"{exercise}/{script}", options)
                record_property(script, run)
                assert script == all_gpus or run["steps"] >= 60  # not the few data
        finally:
            sampling.terminate()


@pytest.mark.timeout(1200)  # two commands
@pytest.mark.parametrize("exercise", mark_few(REQUIRED_FILES, ["mnist_multigpu"]))
def test_bench(exercise, record_property):
    """Rows of bench.py's table, of a shorter run."""
    output = "".join(call(job, BENCH) for job in launches(exercise, 3, 0.5))
    rows = [json.loads(row) for row in re.findall(r"^{.*", output, re.M)]
    record_property("rows", rows)


@pytest.mark.timeout(600)
def test_largest_batch(tmp_path, record_property):
    """The largest batches of cinic.py and cinic_amp.py that fit in memory."""
    with Job(tmp_path / "run", "cinic_lab/largest_batch.py") as job:
        found = re.findall(r"(\d+) is the largest", job.wait())
    record_property("largest", found)
    assert len(found) == 2
