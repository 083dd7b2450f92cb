"""tools/check.py, started by run scripts, on processes that communicate."""

import json
import os
import platform
import re
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import REPOSITORY, fails, run, torchrun
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

    def start(fault, before=()):
        (exercise / "faulty.py").write_text(FAULTY.format(fault))
        command = [*before, "bash", "run-2gpus.sh", "faulty.py"]
        done = run(command, exercise, sample, timeout=100)
        (file,) = (exercise / "logs").iterdir()
        return done, json.loads(file.read_text())

    return start


def test_two_processes_are_checked(exercise, sample):
    done = run(["bash", "run-2gpus.sh", "../tools/check.py"], exercise, sample)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    assert done.stdout.endswith("\nAll is well.\n")
    assert f"\ntorch is {torch.__file__}\n" in done.stdout
    assert done.stdout.count("All is") == 1
    (file,) = (exercise / "logs").iterdir()
    assert f"Saved logs/{file.name}" in done.stdout
    found = json.loads(file.read_text())
    assert found["nodes"] == [NODE] and found["backend"] == "gloo"
    assert found["problems"] == found["warnings"] == [] and found["finished"]
    for rank, process in enumerate(found["processes"]):
        assert (process["rank"], process["node"]) == (rank, NODE)
        assert process["threads"] == 1 and process["cpus"] in done.stdout
        assert torch.__version__ in process["versions"]
        assert process["float32_tflops"] > 0 and process["bfloat16_tflops"] > 0
    assert [row["bytes"] for row in found["all_reduce"]] == list(check.SIZES[:4])
    for row in found["all_reduce"]:
        assert (row["over"], row["nodes"], row["processes"]) == (NODE, 1, 2)
        # For two processes this is bytes a second: 2 (n - 1) / n is 1.
        speed = row["bytes"] / row["seconds"] / 1e9
        assert row["bus_gb_per_s"] == pytest.approx(speed) and row["correct"]
        assert re.search(rf" {row['bytes']} .* {speed:.4g}", done.stdout)
    (data,) = found["data"]
    assert data["exercises"] == list(machine.REQUIRED_FILES)
    assert data["datadir"] == str(sample) and data["read_gb_per_s"] > 0


def test_missing_folders_are_reported(exercise, tmp_path):
    file, none = tmp_path / "here.json", tmp_path / "none"
    command = ["bash", "run.sh", "../tools/check.py", "--to", file]
    done = run(command, exercise, none, TMPDIR="/nowhere")
    assert done.returncode == 1 and done.stderr == ""
    assert "No communication with one process" in done.stdout
    found = json.loads(file.read_text())
    data, tmpdir = found["problems"]
    assert data.startswith(f"{NODE} cannot read DATADIR, [Errno 2] No such file")
    assert f"'{none}': set DATADIR" in data
    assert tmpdir.startswith(f"on {NODE} TMPDIR /nowhere cannot be written")
    assert done.stdout.endswith(f"Problem: {data}\nProblem: {tmpdir}\n")
    assert found["all_reduce"] == [] and not (exercise / "logs").exists()


def test_a_file_that_cannot_be_written_is_one_line(exercise, tmp_path):
    (tmp_path / "file").write_text("here")
    file = tmp_path / "file/check.json"
    done = run(["bash", "run-2gpus.sh", "../tools/check.py", "--to", file], exercise)
    fails(done, f"cannot write {file} (", "; use `--to FILE`, with a file")


def test_wrong_numbers_and_too_few_cpus_are_reported(start):
    cpu = min(os.sched_getaffinity(0))
    done, found = start(WRONG, ["taskset", "--cpu-list", str(cpu)])
    assert done.returncode == 1 and done.stderr == "", done.stderr
    line = f"Problem: all_reduce of 4096 bytes over {NODE} gives wrong numbers: tell"
    assert done.stdout.splitlines()[-1].startswith(line)
    assert [row["correct"] for row in found["all_reduce"]] == [False]
    line = f"on {NODE} 2 processes with 2 threads compete for CPU {cpu}: request"
    assert f"\nWarning: {line}" in done.stdout and len(found["warnings"]) == 1


# A network on which 64 KB take 1 s: 1 MB would take five times 16 s.
SLOW = """
def slow(operation, device, slowest=float):
    operation()
    return slowest(1.0 if operation.args[0].nbytes > 4096 else 0.05)

machine.median_seconds, check.SIZES = slow, (2**12, 2**16, 2**20)
machine.NODE = "n1" if int(os.environ["RANK"]) < 2 else "n2"
"""


@pytest.mark.slow
def test_slow_nodes_and_wrong_numbers_of_one_are_reported(exercise, sample):
    """Four processes here stand in for two nodes; the second gives wrong numbers."""
    (exercise / "faulty.py").write_text(FAULTY.format(WRONG + SLOW))
    done = torchrun(4, ["faulty.py", "--to", "out.json"], exercise, sample)
    assert done.returncode == 1, done.stderr
    found = json.loads((exercise / "out.json").read_text())
    assert found["nodes"] == [row["node"] for row in found["data"]] == ["n1", "n2"]
    groups = [("all", 2, 4), ("n1", 1, 2), ("n2", 1, 2)]
    names = "over", "nodes", "processes", "bytes"
    rows = [tuple(row[name] for name in names) for row in found["all_reduce"]]
    assert sorted(rows) == [(*g, size) for g in groups for size in (2**12, 2**16)]
    for row in found["all_reduce"]:
        assert row["correct"] == (row["over"] == "n1")
        factor = {2: 1, 4: 1.5}[row["processes"]]  # 2 (n - 1) / n
        speed = factor * row["bytes"] / row["seconds"] / 1e9
        assert row["bus_gb_per_s"] == pytest.approx(speed)
    assert len(found["problems"]) == 4 and "over n2" in " ".join(found["problems"])
    slow = [text for text in found["warnings"] if "than 65536 bytes over" in text]
    assert len(slow) == 3 and "SOCKET_IFNAME" in slow[0]


HANGS = "lambda *args, **options: time.sleep(99)"


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault, words",
    [
        ("time.sleep(99 * int(os.environ['RANK']))", "rank 1 on an.*: no answer"),
        (f"dist.init_process_group = {HANGS}", "does not connect.*IFNAME"),
        (f"dist.all_reduce = {HANGS}", "all_reduce of 4096 bytes.*IFNAME"),
        (f"machine.read_data = {HANGS}", f"rank 0 on {NODE}: no data within 3 s"),
    ],
)
def test_a_missing_rank_and_a_hanging_network_are_reported(fault, words, start):
    """It ends with one line, which is also the file's problem."""
    done, found = start(f"check.WAIT = timedelta(seconds=3)\n{fault}")
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    (line,) = [text for text in done.stderr.splitlines() if "rror: " in text]
    assert re.search(words, line) and not found["finished"], line
    saved = [] if "rank 0" in words else [line.removeprefix("Error: ")]
    assert found["problems"] == saved  # rank 0 writes the file


@pytest.mark.parametrize("seconds", [1e-5, 1e-2, 3.0])
def test_fast_operations_are_repeated_and_slow_ones_are_not(seconds, monkeypatch):
    now, done = [0.0], []
    clock = SimpleNamespace(perf_counter=lambda: now[0])
    monkeypatch.setattr(machine, "time", clock)

    def operation():  # only here time passes
        now[0] += seconds
        done.append(operation)

    measured = machine.median_seconds(operation, torch.device("cpu"))
    assert measured == pytest.approx(seconds)
    assert len(done) == 5 or (len(done) > 5 and now[0] < 0.8)


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


@pytest.mark.parametrize(
    "problems, warnings, here",
    [
        ("", "", [process(0, "a"), process(1, "b")]),
        ("", "", [process(0, "a"), process(1, "a", node="n2")]),
        ("ranks 2, 3 on n1 share GPU a", "", [process(2, "a"), process(3, "a")]),
        ("", "", [process(0, cpus="0", count=1), process(1, cpus="1", count=1)]),
        ("", "5 threads compete for CPU 0-3", [process(0, threads=4), process(1)]),
        ("none of this job's GPUs on n1", "", [process(0, gpus_unseen=True)]),
        ("", "n1 is busy", [process(0, load=4.5), process(1, load=4.5)]),
    ],
)
def test_processes_are_judged(problems, warnings, here, tmp_path, monkeypatch):
    job = check.Job(tmp_path / "check.json")
    monkeypatch.setattr(job, "gather", lambda what, row: here)
    monkeypatch.setattr(machine, "matmul_tflops", lambda device: {})
    check.check_processes(job)
    for kind, words in (("problems", problems), ("warnings", warnings)):
        assert len(job.found[kind]) == bool(words)
        assert re.search(words, " ".join(job.found[kind]))


@pytest.mark.parametrize("asked", [False, True])
def test_a_shared_gpu_may_be_asked_for(asked, tmp_path, monkeypatch, capsys):
    job = check.Job(tmp_path / "check.json")
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", str(int(asked)))
    gpus = {("n1", "a"): [process(0, "a"), process(1, "a")]}
    gpus["n1", "b"] = [process(2, "b")]
    check.check_gpu_sharing(job, gpus)
    assert job.found["gpus_shared"] == 2
    problem = "ranks 0, 1 on n1 share GPU a: start one torchrun"
    assert [text[: len(problem)] for text in job.problems] == [problem] * (not asked)
    shown = "share GPU a, as NCCL_MULTI_RANK_GPU_ENABLE asks for: they take turns"
    assert (shown in capsys.readouterr().out) == asked


def test_exercises_with_complete_data_are_found(sample, tmp_path):
    shutil.copytree(sample, tmp_path / "data")
    (tmp_path / "data/dogs-vs-cats/test.pt").unlink()
    found = machine.read_data(tmp_path / "data")
    assert found["exercises"] == [*machine.REQUIRED_FILES][1:]
    assert found["error"] is None and Path(found["file"]).is_file()
    assert found["unprepared"] == []
    text, other = tmp_path / "data/MNIST/train.pt", tmp_path / "data/MNIST/test.pt"
    text.write_text("<html>")
    torch.save({"images": torch.zeros(2, 3)}, other)
    found = machine.read_data(tmp_path / "data")
    assert found["unprepared"] == [str(text), str(other)] and found["error"] is None


@pytest.mark.parametrize(
    "folder, problem",
    [
        ("short", None),
        ("x" * 69, "has 69 .* too long"),
        ("none", "none cannot be written"),
    ],
)
def test_tmpdir_is_short_and_can_be_written(folder, problem, tmp_path, monkeypatch):
    (tmp_path / "short").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TMPDIR", folder)
    found = machine.find_tmpdir_problem()
    assert found == problem or re.match(problem, found)


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
