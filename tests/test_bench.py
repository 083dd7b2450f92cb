"""bench.py with its timing, and gpu.py, which `make test-gpu` runs."""

import json
import math
import sys
from functools import partial
from itertools import count
from types import SimpleNamespace

import gpu
import gpu_jobs
import gpu_losses
import gpu_rows
import pytest
import torch
from conftest import copy_exercise, make_data, run
from record_script import Freezer, record

import bench
import timing
from common.data import InMemoryDataset


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_failure_keeps_the_other_results(tmp_path):
    data = make_data(tmp_path / "data", 0.5)
    (data / "MNIST/train.pt").write_text("damaged")
    folder = copy_exercise("bench", tmp_path)
    for file in (folder / "results").iterdir():
        file.unlink()
    command = [sys.executable, "bench.py", "--repeats", "1", "--seconds", "0.1"]
    for name in ("mnist_multigpu", "exercise8", "dp_ddp_intro"):
        command += ["--only", name]
    done = run(command, folder, data, timeout=800)
    assert done.returncode == 1 and "is not prepared data" in done.stderr, (
        done.stderr
    )
    assert "Error: mnist_multigpu failed" in done.stderr
    results = json.loads(next((folder / "results").iterdir()).read_text())
    assert results["check"]["processes"] and str(tmp_path) not in str(results)
    parts = results["exercises"].values()
    assert [len(part["rows"]) for part in parts] == [14, 6]  # none of MNIST


def test_the_ceiling_repeats_one_batch_and_the_first_turn_does_not_count(
    monkeypatch,
):
    seen, data = [], InMemoryDataset(torch.arange(99), torch.arange(99))
    now = [0.0]
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])

    def train(loader):
        seen.append([*loader])
        now[0] += 0.001 * len(loader)

    cases = timing.make_cases(train, data, 2, torch.device("cpu"), 0.01)
    assert [len(speeds) for speeds in timing.measure(cases, 3).values()] == [3, 3]
    ceiling, script = seen[-2:]
    assert all(batch is ceiling[0] for batch in ceiling) and len(ceiling) > 1
    assert any(batch[0].tolist() != script[0][0].tolist() for batch in script)


def test_ddp_is_compared_with_processes_that_do_not_communicate(monkeypatch):
    calls, dist = [], {"get_rank": lambda: 1, "get_world_size": lambda: 2}
    dist["broadcast_object_list"] = lambda steps: steps.__setitem__(0, 3)
    dist["all_gather_object"] = lambda *_: None
    monkeypatch.setattr(timing, "dist", SimpleNamespace(**dist))
    monkeypatch.setattr(timing.time, "perf_counter", count().__next__)
    for averaged, goal in (1e6, 0.9), (1e8, None):
        parts = [torch.zeros(4)], calls.append, len, averaged
        rows = timing.scaling_rows("x", *parts, 1, 1)
        found = [(row["ratio"], row["goal"]) for row in rows]
        assert found == [(2, None), (2, None), (1, goal), (1, None)]
    assert len(calls) == 4  # rank 1 trains alone only beside rank 0


def test_the_last_line_lists_the_rows_below_their_goals():
    row = {"script": "mnist.py", "what": "script / naive", "goal": 1.4}
    rows = [row | {"ratio": 1.396}, row | {"ratio": 0.2, "goal": None}]
    assert timing.format_missed(rows) == "All goals met"
    rows.append(row | {"ratio": 1.02})
    missed = "Missed: mnist.py, script / naive 1.02 (goal 1.40)"
    assert timing.format_missed(rows) == missed


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_gpu_tests_pass_on_cpu_cores():
    done = run(["make", "test-gpu", "GPU=--cpu"], bench.REPOSITORY, timeout=800)
    assert done.returncode == 0 and "0 of 12 failed" in done.stdout, done.stdout


def test_failures_are_in_the_table_of_the_gpu_tests(tmp_path):
    table = gpu.Table(tmp_path / "table.json")
    fails = ["bash", "-c", "echo ValueError; exit 1"]
    for row in (
        gpu_rows.Row("hangs", gpu_rows.run, (["sleep", 1000], tmp_path, 1)),
        gpu_rows.Row("fails", gpu_rows.run, (fails, tmp_path)),
        gpu_rows.Row("works", lambda: {"loss": 1.5}),
    ):
        table.add(row)
    table.save({"what": "shares", "note": "skipped: NCCL 2.27.5 cannot share a GPU"})
    assert table.print() == 2
    rows = json.loads(table.file.read_text())["test_gpu"]["rows"]
    results = ["timed out after 1 s: ", "status 1: ValueError", "ok", "ok"]
    assert [row["result"] for row in rows] == results and rows[2]["loss"] == 1.5


SCRIPT = """
import os, sys, time
print("rank", os.environ.get("RANK"), sys.argv[1:])
if os.environ.get("RANK") == "1":
    sys.exit("ValueError: wrong")
time.sleep(1000 if sys.argv[1] == "hang" else 0)
"""


def test_jobs_end_by_themselves_by_an_error_and_by_their_time_limit(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("DATADIR", "data")
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    with gpu_jobs.Job(tmp_path / "ends", script, "--one") as job:
        assert "rank None ['--one']\n" in job.wait()
    ends = ("hang", 0, "timed out after 5 s: rank None"), ("", 2, "Error: wrong")
    for option, ranks, message in ends:
        job = gpu_jobs.Job(tmp_path / f"ends{ranks}", script, option, ranks=ranks)
        with job, pytest.raises(gpu_jobs.Failed, match=message):
            job.wait(5 if option else 100)
        assert not any(process.is_alive() for process in job.processes)


def test_full_size_has_data_of_its_own(monkeypatch, tmp_path):
    """Those of the other rows are few: a step or two an epoch."""
    monkeypatch.setenv("DATADIR", str(tmp_path / "small"))
    make = gpu_rows.make_data
    monkeypatch.setattr(gpu_rows, "make_data", lambda *args: make(*args[:2], 0.1))
    mnist = gpu_rows.FULL["MNIST"]
    row = gpu_rows.train_at_full_size(tmp_path, tmp_path, "MNIST", *mnist)
    images = len(torch.load(tmp_path / "full/MNIST/train.pt")["images"])
    assert row["one"]["steps"] == 2 * math.ceil(images / 64)


STEPS = """
import sys, torch
from torch.nn.functional import cross_entropy, dropout
WAIT = "import warnings\\nwarnings.warn('called a synchronizing CUDA operation')"

def main():
    torch.manual_seed(0)
    weights = torch.ones(2, 2, requires_grad=True)
    optimizer = torch.optim.SGD([weights], lr=1.0)
    for _ in range(3):
        loss = cross_entropy(dropout(weights, 0.5), torch.tensor([0, 1]))
        loss.backward()
        optimizer.step()
        exec(compile(WAIT, sys.argv[1], "exec"))
    with torch.no_grad():
        cross_entropy(weights * 0, torch.tensor([0, 1]))
"""


def test_losses_and_waits_are_recorded(tmp_path, monkeypatch):
    monkeypatch.setenv("DATADIR", "data")
    script, found = tmp_path / "my_steps.py", []
    script.write_text(STEPS)
    patch = partial(record, draw_on_cpu=True)
    for file in "x.py", "x.py", "site-packages/torch/amp/grad_scaler.py":
        folder = tmp_path / str(len(found))
        with gpu_jobs.Job(folder, script, file, patch=patch) as job:
            job.wait()
            found += job.records()
    mine, same, torchs = found
    assert mine == same and len(mine["training"]) == mine["steps"] == 3
    assert mine["evaluation"] == pytest.approx([math.log(2)], abs=1e-6)
    line = STEPS.split("\n").index(
        '        exec(compile(WAIT, sys.argv[1], "exec"))'
    )
    assert (mine["waits"], mine["lines"]) == (1, {f"my_steps.py:{line + 1}": 3})
    assert (torchs["waits"], torchs["lines"]) == (0, {"fp16's GradScaler": 3})


def test_the_weights_change_in_one_step_only():
    weights, freeze = torch.zeros(1, requires_grad=True), Freezer()
    for steps in 1, 2:  # fine-tuning has an optimizer of its own
        optimizer = torch.optim.SGD([weights], lr=1)
        for _ in range(5):
            weights.grad = torch.ones(1)
            freeze(optimizer)
            optimizer.step()
        assert weights.item() == -steps


def test_a_gpus_losses_are_compared_with_a_cpus():
    rank = {"training": [2.3, 2.2], "evaluation": [2.1], "weights": "a"}
    right = {"ranks": [rank, rank]}
    assert gpu_losses.compare(right, right)["far_from_cpu"] == 0
    wrong = {
        "rank 1, training, loss 2: 2.22, but 2.2": {"training": [2.3, 2.22]},
        "rank 1, training, loss 1: nan": {"training": [math.nan, 2.2]},
        "rank 1, evaluation, loss 1": {"evaluation": [2.4]},
        "weights differ": {"weights": "b"},
    }
    for message, change in wrong.items():
        with pytest.raises(gpu_jobs.Failed, match=message):
            gpu_losses.compare({"ranks": [rank, rank | change]}, right)
    for losses in [4.0, 1.50], [1.471], [4.0, math.inf]:
        with pytest.raises(gpu_jobs.Failed, match="on a CPU"):
            gpu_losses.compare({"printed": losses}, {"printed": [4.052, 1.471]})
    assert gpu_losses.compare({"printed": [9, 1.474]}, {"printed": [4.052, 1.471]})


def test_each_training_script_has_losses_and_tensorflows_have_none():
    recorded = gpu_losses.load()
    scripts = {*gpu_rows.list_scripts(few=False)}
    assert scripts <= recorded.keys() and "beyond_ddp/accumulate.py" in scripts
    assert "tensorflow" not in " ".join(scripts)
