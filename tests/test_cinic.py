"""cinic_lab/: its scripts as students run them, largest_batch.py, the notebook."""

import json
import re
import sys

import pytest
import torch
from conftest import REPOSITORY, call, copy_exercise, load, raises_user_error, run
from run_ranks import Run
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

CPU = torch.device("cpu")
NAMES = "loss", "acc1", "acc5"
NUMBERS = [f"{part}/{name}" for part in ("train", "validation") for name in NAMES]
CURVES = [*NUMBERS, "train/lr"]
NOTEBOOK = json.loads((REPOSITORY / "cinic_lab/cinic.ipynb").read_text())
QUICK = ("--epochs", "2", "--batch-size", "24", "--log-interval", "2")


@pytest.fixture
def exercise(tmp_path):
    return copy_exercise("cinic_lab", tmp_path)


def check(output, exercise, processes, steps):
    """Check the output and the files of a run of two epochs."""
    assert "Warning" not in output, output
    number = r"\d+\.\d+"
    columns = rf"Time {number}  Data {number}  Loss {number}  Acc@1 {number}  Acc@5"
    for epoch in (1, 2):
        line = rf"^Epoch: \[{epoch}\]\[(\d+)/{steps}\]  {columns} {number}$"
        shown = re.findall(line, output, re.M)
        assert shown == [str(batch) for batch in (*range(2, steps, 2), steps)]
    assert len(re.findall(rf"^ \* Acc@1 {number}  Acc@5", output, re.M)) == 2
    (result,) = map(json.loads, (exercise / "logs/results.jsonl").open())
    assert (result["gpus"], result["per_epoch"]) == (processes, 100)
    assert result["gradient_bytes"] == 4 * 11_181_642
    for file in ("checkpoint.pth.tar", "model_best.pth.tar"):
        weights = torch.load(exercise / file, weights_only=True)["model"]
        assert "resnet.conv1.weight" in weights  # bare: no module. in front


@pytest.mark.parametrize(
    "launch, script, processes",
    [
        ("run.sh", "cinic.py", 1),
        ("run-dp.sh", "cinic_dp.py", 1),
        ("run-2gpus.sh", "cinic_ddp.py", 2),
    ],
)
def test_every_script_keeps_its_weights(launch, script, processes, exercise, sample):
    done = run(["bash", launch, script, *QUICK], exercise, sample)
    assert done.returncode == 0, done.stderr
    check(done.stdout + done.stderr, exercise, processes, 5 if processes == 1 else 3)
    # With several ranks only rank 0 has a folder, and curves in it.
    assert len([*exercise.glob("logs/*/events*")]) == (script != "cinic.py")


@pytest.mark.slow
def test_float16_has_a_scaler(exercise, sample):
    few = "--dtype", "fp16", "--epochs", 1, "--batch-size", 48  # it is slow on a CPU
    process = Run(exercise, sample, "cinic_lab/cinic_amp.py", *QUICK, *few)
    assert process.join() == [0], process.output()
    content = torch.load(exercise / "checkpoint.pth.tar", weights_only=True)
    assert content["scaler"]["scale"] > 1 and "nan" not in process.output()
    assert "Autocast dtype: torch.float16\n" in process.output()


def test_tensorboard_has_the_curves_that_are_printed(exercise, sample):
    process = Run(exercise, sample, "cinic_lab/cinic_tensorboard.py", *QUICK)
    assert process.join() == [0], process.output()
    check(process.output(), exercise, 1, 5)
    (file,) = (exercise / "logs").glob("*/events*")
    events = EventAccumulator(str(file)).Reload()
    assert sorted(events.Tags()["scalars"]) == sorted(CURVES)
    for name in NUMBERS:
        steps = [5, 10] if "validation" in name else [2, 4, 5, 7, 9, 10]
        assert [scalar.step for scalar in events.Scalars(name)] == steps
    rates = [scalar.value for scalar in events.Scalars("train/lr")]
    assert rates == pytest.approx([0.1] * 3 + [0.05] * 3)
    shown = re.findall(r"^ \* Acc@1 ([\d.]+)", process.output(), re.M)
    values = [scalar.value for scalar in events.Scalars("validation/acc1")]
    assert values == pytest.approx([*map(float, shown)], abs=0.01)


def test_wandb_has_the_curves_offline(exercise, sample, tmp_path):
    env = {"HOME": str(tmp_path), "WANDB_MODE": "offline"}
    done = run(["bash", "run.sh", "cinic_wandb.py", *QUICK], exercise, sample, **env)
    assert done.returncode == 0, done.stderr
    check(done.stdout + done.stderr, exercise, 1, 5)
    (file,) = (exercise / "logs").glob("wandb/offline-run-*/run-*.wandb")
    assert all(name.encode() in file.read_bytes() for name in CURVES)


@pytest.mark.parametrize("capacity", [1, 2, 3, 37, 100, 128, 1000])
def test_the_largest_batch_is_found(capacity, capsys):
    largest_batch = load("cinic_lab", "largest_batch").largest_batch
    tried = []

    def attempt(batch_size):
        tried.append(batch_size)
        if batch_size > capacity:
            raise RuntimeError("full\nat some place")

    found = largest_batch(attempt, 2**20)
    assert found <= capacity < max(found + 1, 1.05 * found)
    assert min(tried) == 2 and len(set(tried)) == len(tried)
    failed = [size for size in tried if size > capacity]
    assert capsys.readouterr().out == "".join(f"{size:7} full\n" for size in failed)
    assert largest_batch(attempt, 11) == min(capacity, 11)


def test_a_batch_of_the_search_is_trained(monkeypatch):
    names = "largest_batch", "cinic", "cinic_amp"
    largest_batch, *scripts = (load("cinic_lab", name) for name in names)
    reset = "reset_peak_memory_stats"  # the CPU has none
    monkeypatch.setattr(torch.cpu, reset, lambda device: None, raising=False)
    for script, dtype in zip(scripts, (None, torch.bfloat16), strict=True):
        assert min(largest_batch.train(script, "resnet18", 2, CPU, dtype)) > 0


def test_the_notebook_has_the_model_and_the_functions_of_the_script():
    parts = (REPOSITORY / "cinic_lab/cinic.py").read_text().split("\n\n\n")
    equal = {*parts} & {"".join(cell["source"]) for cell in NOTEBOOK["cells"]}
    names = {re.match(r"(@.*\n)?\w+ (\w+)", part)[2] for part in equal}
    assert names == {"Classifier", "train_step", "evaluate"}


@pytest.mark.slow
def test_the_notebook_runs_from_top_to_bottom(exercise, sample):
    shorter = json.dumps(NOTEBOOK).replace("epochs=3", "epochs=1")
    (exercise / "cinic.ipynb").write_text(shorter)
    command = [sys.executable, "-m", "nbconvert", "--to", "notebook", "--execute"]
    done = run([*command, "--inplace", "cinic.ipynb"], exercise, sample)
    assert done.returncode == 0, done.stderr
    cells = json.loads((exercise / "cinic.ipynb").read_text())["cells"]
    output = json.dumps([cell.get("outputs") for cell in cells])
    assert "Acc@5" in output and "image/png" in output
    assert re.findall(r"Epoch (\d): Time", output) == ["1"]
    speeds = re.findall(r"(Classifier|DataParallel): \d+\.\d images/s", output)
    assert speeds == ["Classifier", "DataParallel"]  # part 4


def test_the_search_needs_a_gpu():
    with raises_user_error("no GPU here"):
        call(load("cinic_lab", "largest_batch"))


def test_syncbatchnorm_needs_a_gpu(sample, tmp_path):
    """There `make test-gpu` compares its losses."""
    script = "cinic_lab/cinic_syncbn.py"
    process = Run(tmp_path, sample, script, *QUICK, ranks=2)
    assert 0 not in process.join()
    assert "SyncBatchNorm layers only work with GPU modules" in process.output()
