"""bench/: rows are kept as they are measured, whatever comes after them."""

import json
import sys

import pytest
from conftest import copy_room, run

pytestmark = pytest.mark.slow


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
