"""bench.py with its timing, and gpu.py, which `make test-gpu` runs."""

import json
import sys
import time
from itertools import count
from types import SimpleNamespace

import gpu
import pytest
import torch
from conftest import copy_exercise, make_data, run

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
    done = run(command, folder, data, timeout=800)
    assert done.returncode == 1 and "RuntimeError" in done.stderr, done.stderr
    assert "Error: mnist_multigpu failed" in done.stderr
    results = json.loads(next((folder / "results").iterdir()).read_text())
    assert results["check"]["processes"] and str(tmp_path) not in str(results)
    parts = results["exercises"].values()
    assert [len(part["rows"]) for part in parts] == [14, 8, 8, 6]  # none of MNIST


def test_the_ceiling_repeats_one_batch_and_the_first_turn_does_not_count():
    seen, data = [], InMemoryDataset(torch.arange(99), torch.arange(99))

    def train(loader):
        seen.append([*loader])
        time.sleep(0.001 * len(loader))

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
    for averaged, goal in (1e6, 0.95), (1e8, None):
        parts = [torch.zeros(4)], calls.append, len, averaged
        rows = timing.scaling_rows("x", *parts, 1, 1)
        found = [(row["ratio"], row["goal"]) for row in rows]
        assert found == [(2, None), (2, None), (1, goal), (1, None)]
    assert len(calls) == 4  # rank 1 trains alone only beside rank 0


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_gpu_tests_pass_on_cpu_cores():
    done = run(["make", "test-gpu", "GPU=--cpu"], bench.REPOSITORY, timeout=800)
    assert done.returncode == 0 and "0 of 11 failed" in done.stdout, done.stdout


def test_failures_are_in_the_table_of_the_gpu_tests(tmp_path):
    table = gpu.Table(tmp_path / "table.json")
    table.add("hangs", gpu.run, ["sleep", 1000], tmp_path, 1)
    table.add("fails", gpu.run, ["bash", "-c", "echo ValueError; exit 1"], tmp_path)
    table.add("works", lambda: {"loss": 1.5})
    assert table.print() == 2
    rows = json.loads(table.file.read_text())["test_gpu"]["rows"]
    results = ["timed out after 1 s: ", "status 1: ValueError", "ok"]
    assert [row["result"] for row in rows] == results and rows[2]["loss"] == 1.5


def test_waits_and_wrong_losses_are_failures(tmp_path, monkeypatch):
    (tmp_path / "tests").symlink_to(bench.REPOSITORY / "tests")
    (tmp_path / "lesson").mkdir()
    code = """
import torch, warnings
optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)])
for _ in range(3):
    optimizer.step()
    warnings.warn("called a synchronizing CUDA operation")
print("train loss 1.0")
"""
    (tmp_path / "lesson/steps.py").write_text(code)
    monkeypatch.setattr(gpu, "REPOSITORY", tmp_path)
    on_cpu = SimpleNamespace(result=lambda: [2.0])
    for more, message in ([], "each step waits"), ([on_cpu], "differs by 50%"):
        with pytest.raises(gpu.Failed, match=message):
            gpu.train(tmp_path, "lesson/steps.py", 1, "", *more)


def test_tensorflows_scripts_are_left_out():
    scripts = " ".join(gpu.list_scripts(2, few=False))
    assert "accumulate.py" in scripts and "tensorflow" not in scripts


def test_operations_of_a_step_are_counted():
    command = [sys.executable, "count_operations.py", "exercise8", "--names"]
    done = run(command, bench.BENCH)
    assert done.returncode == 0, done.stderr
    _, _, loop, foreach, fused, *names = done.stdout.splitlines()
    rows = [row.split() for row in (loop, foreach, fused)]
    assert [row[2] for row in rows] == ["loop", "foreach", "fused"]
    (training, optimizer, _, weights), one, _ = rows
    assert training == one[0] and weights == one[3] and int(one[1]) < int(optimizer)
    assert "  13 aten.convolution" in names
