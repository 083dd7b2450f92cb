"""bench/: it ends, also where something fails, and keeps what it measured."""

import json
import sys

import pytest
from check import NEEDS
from conftest import copy_room, draw, run


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_all_exercises_in_short(tmp_path):
    data = draw(tmp_path / "data", 1)
    room = copy_room("bench", tmp_path)
    for file in (room / "results").iterdir():
        file.unlink()
    command = [sys.executable, "bench.py", "--repeats", "1", "--seconds", "0.1"]
    done = run(command, room, data, timeout=800)
    assert done.returncode == 0, done.stderr
    (file,) = (room / "results").iterdir()
    assert done.stdout.splitlines()[-1] == f"Saved {file}"
    exercises = json.loads(file.read_text())["exercises"]
    assert list(exercises) == list(NEEDS)
    for measured in exercises.values():
        assert measured["complete"] and len(measured["rows"]) >= 6
        assert all(row["images_per_second"] > 0 for row in measured["rows"])


NEVER_ENDS = """
import sys
sys.path.insert(0, "../bench")
import measure
wait = "import time; print(1, flush=True); time.sleep(1000)"
open("wait.py", "w").write(wait)
with measure.as_it_comes("wait.py") as case:
    print(case())
"""


@pytest.mark.slow
def test_a_child_that_does_not_end_is_ended(tmp_path):
    room = copy_room("bench", tmp_path)
    done = run([sys.executable, "-c", NEVER_ENDS], room, timeout=60)
    assert (done.returncode, done.stdout) == (0, "1\n"), done.stderr


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_what_wants_a_gpu_on_cpu_cores(tmp_path):
    room = copy_room("bench", tmp_path)
    done = run([sys.executable, "test_gpu.py", "--cpu"], room, timeout=800)
    assert done.returncode == 0, done.stdout[-3000:]
    assert "0 of 10 failed. Please send in " in done.stdout.splitlines()[-1]
    found = json.loads((room / "logs/test_gpu.json").read_text())["test_gpu"]
    assert len(found["rows"]) == 10
    assert {row["result"] for row in found["rows"]} == {"ok"}


def test_without_a_gpu_it_says_so(tmp_path):
    room = copy_room("bench", tmp_path)
    done = run([sys.executable, "test_gpu.py"], room)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("Error: there is no GPU here; ")


FAILS = """
import json, sys
sys.path.insert(0, "../bench")
import test_gpu
from pathlib import Path

def hangs():
    command = [sys.executable, "-c", "import time; time.sleep(1000)"]
    test_gpu.run(command, ".", limit=1)

def fails():
    test_gpu.run([sys.executable, "-c", "raise ValueError('this is it')"], ".")

table = test_gpu.Table(Path("table.json"))
table.add("it hangs", hangs)
table.add("it fails", fails)
table.add("it works", lambda: {"loss": 1.5})
print(table.print())
"""


def test_a_failure_is_in_the_table_and_the_rest_goes_on(tmp_path):
    room = copy_room("bench", tmp_path)
    done = run([sys.executable, "-c", FAILS], room)
    assert done.stdout.splitlines()[-1] == "2", done.stderr
    rows = json.loads((room / "table.json").read_text())["test_gpu"]["rows"]
    assert [row["what"] for row in rows] == ["it hangs", "it fails", "it works"]
    assert rows[0]["result"].startswith("no end after 1 s")
    assert rows[1]["result"] == "status 1: ValueError: this is it"
    assert rows[2]["result"] == "ok" and rows[2]["loss"] == 1.5


@pytest.mark.slow
def test_what_fails_does_not_lose_what_was_measured(tmp_path):
    room = copy_room("bench", tmp_path)
    for file in (room / "results").iterdir():
        file.unlink()
    (tmp_path / "data/MNIST/raw").mkdir(parents=True)  # and nothing in it
    command = [sys.executable, "bench.py", "--repeats", "1"]
    for name in ("dp_ddp_intro", "mnist_multigpu"):
        command += ["--only", name]
    done = run(command, room, tmp_path / "data")
    assert done.returncode == 1, done.stderr
    assert "Error: mnist_multigpu failed" in done.stderr
    assert "damaged" in done.stderr  # and it has said why
    (file,) = (room / "results").iterdir()
    results = json.loads(file.read_text())
    assert len(results["check"]["processes"]) == 2  # what check.py says
    assert "All this is in " in done.stdout  # its last line but one
    measured = results["exercises"]
    assert list(measured) == ["dp_ddp_intro"]
    rows = measured["dp_ddp_intro"]["rows"]
    assert len(rows) == 6 and all(row["images_per_second"] > 0 for row in rows)
    table = [line for line in done.stdout.splitlines() if line.startswith("| dp_")]
    assert len(table) == 6
