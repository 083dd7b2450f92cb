"""bench.py and test_gpu.py."""

import json
import sys
from functools import partial

import pytest
import timing
from check import REQUIRED_FILES
from conftest import copy_exercise, fails, make_data, run


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_all_exercises_are_measured(tmp_path):
    data = make_data(tmp_path / "data", 1)
    exercise = copy_exercise("bench", tmp_path)
    for file in (exercise / "results").iterdir():
        file.unlink()
    command = [sys.executable, "bench.py", "--repeats", "1", "--seconds", "0.1"]
    done = run(command, exercise, data, timeout=800)
    assert done.returncode == 0, done.stderr
    (file,) = (exercise / "results").iterdir()
    assert done.stdout.splitlines()[-1] == f"Saved {file}"
    exercises = json.loads(file.read_text())["exercises"]
    assert list(exercises) == list(REQUIRED_FILES)
    for measured in exercises.values():
        assert measured["complete"] and len(measured["rows"]) >= 6
        assert all(row["images_per_second"] > 0 for row in measured["rows"])


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_gpu_tests_pass_on_cpu_cores(tmp_path):
    exercise = copy_exercise("bench", tmp_path)
    done = run([sys.executable, "test_gpu.py", "--cpu"], exercise, timeout=800)
    assert done.returncode == 0, done.stdout[-3000:]
    assert "0 of 10 failed. Please send " in done.stdout.splitlines()[-1]
    found = json.loads((exercise / "logs/test_gpu.json").read_text())["test_gpu"]
    assert len(found["rows"]) == 10
    assert {row["result"] for row in found["rows"]} == {"ok"}


def test_no_gpu_is_an_error(tmp_path):
    exercise = copy_exercise("bench", tmp_path)
    done = run([sys.executable, "test_gpu.py"], exercise)
    fails(done, "PyTorch finds no GPU")


FAILS = """
import sys
sys.path.insert(0, "../bench")
import test_gpu
from pathlib import Path

def run(code):
    test_gpu.run([sys.executable, "-c", code], ".", limit=10)

table = test_gpu.Table(Path("table.json"))
table.add("it hangs", run, "import time; time.sleep(1000)")
table.add("it fails", run, "raise ValueError('this is it')")
hint = "torch.compile found no compiler; run `g++ --version`"
table.add("it cannot run", run, f"exit('{hint}')")
table.add("it works", lambda: {"loss": 1.5})
print(table.print())
"""


@pytest.mark.slow
def test_a_failure_is_in_the_table_and_the_rest_continues(tmp_path):
    exercise = copy_exercise("bench", tmp_path)
    done = run([sys.executable, "-c", FAILS], exercise)
    assert done.stdout.splitlines()[-1] == "2", done.stderr
    rows = json.loads((exercise / "table.json").read_text())["test_gpu"]["rows"]
    results = [row["result"] for row in rows]
    assert results[0].startswith("timed out after 10 s")
    assert results[1] == "status 1: ValueError: this is it"
    assert results[2].startswith("skipped: torch.compile found no compiler")
    assert results[3] == "ok" and rows[3]["loss"] == 1.5


def test_the_first_turn_does_not_count():
    images = {"one": [0, 5, 5, 5], "other": [0, 7, 7, 7]}
    cases = {name: partial(next, iter(found)) for name, found in images.items()}
    speeds = timing.measure(cases, 3)
    assert [len(found) for found in speeds.values()] == [3, 3]
    assert all(speed > 0 for found in speeds.values() for speed in found)


@pytest.mark.slow
def test_a_failure_keeps_the_other_results(tmp_path):
    exercise = copy_exercise("bench", tmp_path)
    for file in (exercise / "results").iterdir():
        file.unlink()
    for split in ("train", "test"):  # and nothing in it
        (tmp_path / f"data/MNIST/{split}.pt").mkdir(parents=True)
    command = [sys.executable, "bench.py", "--repeats", "1"]
    for name in ("dp_ddp_intro", "mnist_multigpu"):
        command += ["--only", name]
    done = run(command, exercise, tmp_path / "data")
    assert done.returncode == 1, done.stderr
    assert "Error: mnist_multigpu failed" in done.stderr
    assert "IsADirectoryError" in done.stderr  # the reason
    (file,) = (exercise / "results").iterdir()
    results = json.loads(file.read_text())
    assert len(results["check"]["processes"]) == 2
    assert str(tmp_path) not in json.dumps(results["check"])
    assert "Saved " in done.stdout  # its last line but one
    measured = results["exercises"]
    assert list(measured) == ["dp_ddp_intro"]
    rows = measured["dp_ddp_intro"]["rows"]
    assert len(rows) == 6 and all(row["images_per_second"] > 0 for row in rows)
    table = [line for line in done.stdout.splitlines() if line.startswith("| dp_")]
    assert len(table) == 6
