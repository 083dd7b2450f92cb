"""tools/check.py, started by run scripts, on processes that communicate."""

import json
import platform
import re
import shutil
import sys
import time
from functools import partial

import pytest
import torch
from conftest import REPOSITORY, fails, run
from torch.utils.flop_counter import FlopCounterMode

import check
import machine

NODE = platform.node().split(".")[0]
# check.py with a fault, and without long measurements.
FAULTY = """
import os, sys, time
from datetime import timedelta
sys.path.insert(0, "../tools")
import check, machine
import torch.distributed as dist

def median_seconds(operation, device, slowest=float):
    operation()
    return slowest(0.001)

machine.median_seconds, check.SIZES = median_seconds, (4096,)
{}
check.main()
"""
# The last rank adds a wrong number to the sum.
WRONG = """
SUM, real_all_reduce = dist.ReduceOp.SUM, dist.all_reduce

def all_reduce(x, op=SUM, group=None):
    if op == SUM:
        x[x.numel() - (dist.get_rank() == dist.get_world_size() - 1):].add_(1)
    real_all_reduce(x, op, group)

dist.all_reduce = all_reduce
"""


@pytest.fixture
def start(exercise, sample):
    """Return a function that runs check.py with a fault, and returns its results."""

    def start(fault):
        (exercise / "faulty.py").write_text(FAULTY.format(fault))
        done = run(["bash", "run-2gpus.sh", "faulty.py"], exercise, sample)
        (file,) = (exercise / "logs").iterdir()
        return done, json.loads(file.read_text())

    return start


def test_two_processes_are_checked(exercise, sample):
    done = run(["bash", "run-2gpus.sh", "../tools/check.py"], exercise, sample)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    assert done.stdout.endswith("\nAll is well.\n")
    assert f"\ntorch is {torch.__file__}\n" in done.stdout
    (file,) = (exercise / "logs").iterdir()
    found = json.loads(file.read_text())
    assert found["nodes"] == [NODE] and found["backend"] == "gloo"
    assert found["problems"] == found["warnings"] == [] and found["finished"]
    assert [process["rank"] for process in found["processes"]] == [0, 1]
    assert [row["bytes"] for row in found["all_reduce"]] == list(check.SIZES[:4])
    for row in found["all_reduce"]:
        assert (row["over"], row["nodes"], row["processes"]) == (NODE, 1, 2)
        speed = row["bytes"] / row["seconds"] / 1e9  # 2 (n - 1) / n is 1 for two
        assert row["bus_gb_per_s"] == pytest.approx(speed) and row["correct"]
        assert re.search(rf" {row['bytes']} .* {speed:.4g}", done.stdout)
    (data,) = found["data"]
    assert data["exercises"] == list(machine.REQUIRED_FILES)
    assert data["datadir"] == str(sample) and data["read_gb_per_s"] > 0


def test_the_bus_bandwidth_is_that_of_nccl_tests():
    """A ring of n sends 2 (n - 1) / n of the bytes over every link."""
    assert check.bus_bandwidth(8, 1e9, 0.5) == 2 * 1.75


def test_missing_folders_are_reported(exercise, tmp_path):
    """One process has no communication to check."""
    file, none = tmp_path / "here.json", tmp_path / "none"
    command = ["bash", "run.sh", "../tools/check.py", "--to", file]
    done = run(command, exercise, none, TMPDIR="/nowhere")
    assert done.returncode == 1 and done.stderr == ""
    data, tmpdir = json.loads(file.read_text())["problems"]
    assert re.match(rf"{NODE} cannot read .*'{none}': set DATADIR to", data)
    assert tmpdir.startswith(f"on {NODE} TMPDIR /nowhere cannot be written")
    assert done.stdout.endswith(f"Problem: {data}\nProblem: {tmpdir}\n")


def test_a_file_that_cannot_be_written_is_one_line(exercise):
    done = run(["bash", "run.sh", "../tools/check.py", "--to", "run.sh/x"], exercise)
    fails(done, "cannot write run.sh/x (", "use `--to FILE`")


def test_wrong_numbers_are_reported(start):
    done, found = start(WRONG)
    assert done.returncode == 1 and done.stderr == "", done.stderr
    line = f"Problem: all_reduce of 4096 bytes over {NODE} gives wrong numbers: tell"
    assert line in done.stdout
    assert [row["correct"] for row in found["all_reduce"]] == [False]


HANGS = "lambda *args, **options: time.sleep(99)"


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault, words",
    [
        ("time.sleep(99 * int(os.environ['RANK']))", "rank 1 on an.*: no answer"),
        (f"dist.init_process_group = {HANGS}", "does not connect.*IFNAME"),
        (f"dist.all_reduce = {HANGS}", "all_reduce of 4096 bytes.*IFNAME"),
    ],
)
def test_a_missing_rank_and_a_hanging_network_are_reported(fault, words, start):
    """It ends with one line, which is also the file's problem."""
    done, found = start(f"check.WAIT = timedelta(seconds=3)\n{fault}")
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    (line,) = [text for text in done.stderr.splitlines() if "rror: " in text]
    assert re.search(words, line) and not found["finished"], line
    assert found["problems"] == [line.removeprefix("Error: ")]


@pytest.mark.parametrize("seconds, times", [(1e-3, 502), (3.0, 5)])
def test_only_fast_operations_are_repeated(seconds, times, monkeypatch):
    """After two to warm up: five medians of 0.1 s, or three of one operation."""
    calls = []
    monkeypatch.setattr(time, "perf_counter", lambda: seconds * len(calls))
    operation = partial(calls.append, "only here time passes")
    measured = machine.median_seconds(operation, torch.device("cpu"))
    assert measured == pytest.approx(seconds) and len(calls) == times


def test_tflops_count_what_pytorch_counts(monkeypatch):
    def picoseconds(operation, device):  # at 1 FLOP per picosecond
        with FlopCounterMode(display=False) as counter:
            operation()
        return counter.get_total_flops() / 1e12

    monkeypatch.setattr(machine, "median_seconds", picoseconds)
    assert {*machine.matmul_tflops(torch.device("cpu")).values()} == {1.0}


def process(rank, gpu=None, cpus="0-3", count=4, threads=1, load=0, **more):
    facts = {"rank": rank, "node": "n1", "uuid": gpu, "threads": threads}
    facts |= {"cpus": cpus, "cpu_count": count, "node_cpu_count": 4, "load": load}
    facts |= {"device": "A100", "memory_gb": 40, "gpus_unseen": False}
    return facts | more


SHARING = [process(2, "a"), process(3, "a"), process(4, "b")]


@pytest.fixture
def judge(tmp_path, monkeypatch):
    """Return a function that returns check.py's job with these processes."""

    def judge(processes):
        job = check.Job(tmp_path / "check.json")
        monkeypatch.setattr(job, "gather", lambda what, row: processes)
        check.check_processes(job)
        return job

    monkeypatch.setattr(machine, "matmul_tflops", lambda device: {})
    return judge


@pytest.mark.parametrize(
    "problem, warning, processes",
    [
        ("", "", [process(0, "a"), process(1, "b")]),
        ("", "", [process(0, "a"), process(1, "a", node="n2")]),
        ("ranks 2, 3 on n1 share GPU a: start one", "", SHARING),
        ("", "", [process(0, cpus="0", count=1), process(1, cpus="1", count=1)]),
        ("", "5 threads compete for CPU 0-3", [process(0, threads=4), process(1)]),
        ("none of this job's GPUs on n1", "", [process(0, gpus_unseen=True)]),
        ("", "n1 is busy", [process(0, load=4.5), process(1, load=4.5)]),
    ],
)
def test_processes_are_judged(problem, warning, processes, judge):
    job = judge(processes)
    for texts, words in (job.problems, problem), (job.warnings, warning):
        assert len(texts) == bool(words)
        assert re.search(words, " ".join(texts))


def test_ranks_may_share_a_gpu_if_that_is_asked_for(judge, monkeypatch, capsys):
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    job = judge(SHARING)
    assert job.problems == [] and job.found["gpus_shared"] == 2
    assert "ranks 2, 3 on n1 share GPU a, as NCCL_MULTI_" in capsys.readouterr().out


def test_exercises_with_complete_data_are_found(sample, tmp_path):
    shutil.copytree(sample, tmp_path / "data")
    (tmp_path / "data/dogs-vs-cats/test.pt").unlink()
    text, other = tmp_path / "data/MNIST/train.pt", tmp_path / "data/MNIST/test.pt"
    text.write_text("<html>")
    torch.save({"images": torch.zeros(2, 3)}, other)
    found = machine.read_data(tmp_path / "data")
    assert found["exercises"] == [*machine.REQUIRED_FILES][1:]
    assert found["unprepared"] == [str(text), str(other)] and found["error"] is None


def test_another_torch_is_named(tmp_path):
    """It cannot be imported, because PYTHONPATH leads to it."""
    (tmp_path / "torch.py").write_text("")
    command = [sys.executable, REPOSITORY / "tools/check.py"]
    done = run(command, tmp_path, PYTHONPATH=str(tmp_path))
    assert done.returncode == 1 and "Traceback" not in done.stderr
    (line,) = done.stderr.splitlines()
    assert f"found is {tmp_path}/torch.py; if PYTHONPATH leads there" in line


def test_its_two_files_can_be_copied_anywhere(tmp_path):
    """They import only PyTorch."""
    for name in ("check.py", "machine.py"):
        shutil.copy(REPOSITORY / "tools" / name, tmp_path)
    others = "common", "tqdm", "numpy", "matplotlib", "torchvision"
    code = f"import sys; sys.modules |= dict.fromkeys({others}); import check"
    done = run([sys.executable, "-c", f"{code}; check.main()"], tmp_path, tmp_path)
    assert done.returncode == 0, done.stderr
    assert re.search("TFLOP/s: float32 .*\nAll is well.\n$", done.stdout, re.S)
