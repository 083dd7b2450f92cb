"""dp_ddp_intro/tensorflow_scripts, in a separate environment: `make test-all`."""

import importlib
import json
import os
import re
import sys
from argparse import Namespace

import pytest
from conftest import REPOSITORY, copy_exercise, run

reason = "no TensorFlow in this environment; run make test-all"
tf = pytest.importorskip("tensorflow", reason=reason)
RECORD = REPOSITORY / "tests/record_tensorflow.py"
TINY = ("--layers", 1, "--width", 32, "--heads", 4, "--length", 16, "--lr", 0.003)


@pytest.fixture
def exercise(tmp_path):
    return copy_exercise("dp_ddp_intro", tmp_path)


@pytest.fixture
def load(monkeypatch):
    """Return a function that imports a module of the exercise."""
    monkeypatch.syspath_prepend(REPOSITORY / "dp_ddp_intro/tensorflow_scripts")
    return importlib.import_module


def result(exercise):
    (line,) = (exercise / "logs/results.jsonl").open()
    return json.loads(line)


def losses(script, launch, batch_size, tmp_path, *options, **env):
    """Return the losses of 20 steps on all of 16 sequences, and the result."""
    folder = tmp_path / f"{script}{len(options)}"
    folder.mkdir()
    exercise = copy_exercise("dp_ddp_intro", folder)
    (exercise / "record.py").symlink_to(RECORD)
    command = ["bash", launch, "record.py", folder / "losses"]
    command.append(f"tensorflow_scripts/{script}.py")
    sizes = ["--sequences", 16, "--epochs", 20, "--batch-size", batch_size]
    done = run([*command, *TINY, *sizes, *options], exercise, **env)
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr and "rror:" not in done.stderr, done.stderr
    seen = [json.loads(file.read_text()) for file in folder.glob("losses.*")]
    assert all(each == seen[0] for each in seen) and len(seen[0]) in (1, 20)
    return seen[0], result(exercise)


def test_two_devices_and_two_workers_follow_one_device(tmp_path):
    launch = "jobscript_tensorflow.sh"
    one, alone = losses("single", launch, 16, tmp_path)
    two, both = losses("mirrored_strategy", launch, 8, tmp_path)
    assert two == pytest.approx(one, rel=0, abs=1e-4) and one[-1] < one[0] - 1
    # The mean of 20 batches: unless all workers shuffle alike, some are left out.
    sgd = tmp_path, "--lr", 0.3, "--sequences", 320, "--epochs", 1
    one, _ = losses("single", launch, 16, *sgd, SGD="1")
    launch = "jobscript_tensorflow_2nodes.sh"
    workers, apart = losses("multi_worker_mirrored", launch, 8, *sgd, SGD="1")
    assert workers == pytest.approx(one, rel=0, abs=1e-4) and one[0] < 5.6
    assert (alone["gpus"], both["gpus"], apart["gpus"]) == (1, 2, 2)
    for each in (alone, both, apart):
        assert each["options"]["batch_size"] * each["gpus"] == 16
        assert each["per_epoch"] == 16 * each["options"]["sequences"]
        assert len(each["epoch_ends"]) == each["options"]["epochs"]
        assert min(each["epoch_seconds"]) > 0 and each["peak_memory_gb"] > 0.1
        assert each["cpu"].strip() and each["cpus"] == os.cpu_count()


def test_the_model_is_causal_and_uses_positions(load):
    args = Namespace(layers=2, width=32, heads=4, length=16, lr=0.001, verbose=False)
    model = load("keras_model").make_model(args)
    tokens = tf.random.uniform((3, 16), 0, 256, tf.int32, seed=0)
    before = model(tokens).numpy()
    assert before.shape == (3, 16, 256)
    other = tf.concat([tokens[:, :9], (tokens[:, 9:] + 1) % 256], axis=1)
    after = model(other).numpy()
    assert (after[:, :9] == before[:, :9]).all()
    assert (after[:, 9:] != before[:, 9:]).any(axis=2).all()
    # Two embeddings; 16 tensors a block; a norm and the head.
    assert len(model.trainable_variables) == 2 + 2 * 16 + 4


@pytest.mark.parametrize(
    "script", ["single", "mirrored_strategy", "multi_worker_mirrored"]
)
def test_each_replica_prints_its_input_size(script, exercise):
    nodes = "_2nodes" if script == "multi_worker_mirrored" else ""
    launch = f"jobscript_tensorflow{nodes}.sh"
    command = ["bash", launch, f"tensorflow_scripts/{script}.py"]
    options = ["--sequences", 32, "--batch-size", 8, "--epochs", 1, "--verbose"]
    done = run([*command, *TINY, *options], exercise)
    assert done.returncode == 0, done.stderr
    hello = sorted(line for line in done.stdout.splitlines() if "Hello" in line)
    # Four steps of one replica, or two steps of two.
    replicas = [0] * 4 if script == "single" else [0, 0, 1, 1]
    assert hello == [
        f"Hello from replica {i} with input size [8 16]" for i in replicas
    ]


def test_user_errors_are_one_line(exercise):
    command = [sys.executable, "tensorflow_scripts/multi_worker_mirrored.py"]
    done = run(command, exercise, TF_CPP_MIN_LOG_LEVEL="3")
    assert done.returncode == 2, done.stderr
    assert "sbatch jobscript_tensorflow_2nodes.sh" in done.stderr.splitlines()[-1]
    script = "tensorflow_scripts/mirrored_strategy.py"
    command = ["bash", "jobscript_tensorflow.sh", script]
    for options, words in (
        (["--sequences", 16, "--batch-size", 16], "use --sequences 32"),
        (["--heads", 3], "--width 33"),
    ):
        done = run([*command, *TINY, *options], exercise)
        assert done.returncode == 2, done.stderr
        assert words in done.stderr.splitlines()[-1]


def test_a_loss_that_is_not_finite_ends_the_run(exercise):
    command = ["bash", "jobscript_tensorflow.sh", "tensorflow_scripts/single.py"]
    options = *TINY, "--lr", 1e9, "--sequences", 64
    done = run([*command, *options], exercise, SMALL="0")
    assert done.returncode == 2 and not (exercise / "logs/results.jsonl").exists()
    assert re.fullmatch(r"Error: the loss is (nan|inf): use a .*\n", done.stderr)
