"""bench.py with its timing, and tests/gpu, which `make test-gpu` runs."""

import fcntl
import json
import math
import sys
from functools import partial
from itertools import count
from types import SimpleNamespace

import pytest
import run_ranks
import torch
from conftest import copy_exercise, make_data, run
from gpu import jobs, rows_together
from gpu.recorder import Freezer, record

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
    command = ["make", "test-gpu", "GPU=-m few"]
    done = run(command, bench.REPOSITORY, timeout=800)
    assert done.returncode == 0, done.stdout
    assert "8 passed" in done.stdout and "4 passed" in done.stdout


SCRIPT = """
import fcntl, os, subprocess, time
if os.environ["RANK"] == "1":
    while not os.path.exists("held"):
        time.sleep(0.1)
    raise ValueError("wrong")
file = open("held", "w")
fcntl.flock(file, fcntl.LOCK_EX)
subprocess.run(["sleep", "1000"], pass_fds=[file.fileno()])
"""


def test_a_row_ends_if_a_rank_fails_and_with_it_all_that_ranks_have_started(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv("DATADIR", "data")
    monkeypatch.setattr(run_ranks, "PATIENCE", 1)
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    with jobs.Job(tmp_path / "job", script, ranks=2) as job:  # noqa: SIM117
        with pytest.raises(AssertionError, match="exit status 1"):
            job.wait()
    assert "ValueError: wrong" in capsys.readouterr().out
    with (job.folder / "held").open() as file:  # by nobody
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


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
        with jobs.Job(folder, script, file, patch=patch) as job:
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


RANK = {"training": [2.3, 2.2], "evaluation": [2.1], "weights": "a"}


@pytest.mark.parametrize(
    "change",
    [
        {"training": [2.3, 2.22]},
        {"training": [math.nan, 2.2]},
        {"evaluation": [2.15]},
        {"weights": "b"},
    ],
)
def test_each_rank_must_have_a_cpus_losses_and_the_others_weights(change):
    right = {"ranks": [RANK, RANK]}
    assert rows_together.compare(right, right) == 0
    with pytest.raises(AssertionError):
        rows_together.compare({"ranks": [RANK, RANK | change]}, right)


@pytest.mark.parametrize("printed", [[4.0, 1.50], [1.471], [4.0, math.inf]])
def test_the_last_printed_loss_must_be_a_cpus(printed):
    right = {"printed": [4.052, 1.471]}
    assert rows_together.compare({"printed": [9, 1.474]}, right) == 0.002039
    with pytest.raises(AssertionError):
        rows_together.compare({"printed": printed}, right)


def test_each_training_script_has_losses_and_tensorflows_have_none():
    recorded = json.loads(rows_together.LOSSES.read_text())
    scripts = {*rows_together.list_scripts()}
    assert scripts <= recorded.keys() and "beyond_ddp/accumulate.py" in scripts
    assert "tensorflow" not in " ".join(scripts)
