"""tools/check.py, started by run scripts, on processes that communicate."""

import json
import os
import platform
import re
import shutil
import sys
from types import SimpleNamespace

import check
import pytest
import torch
from conftest import REPOSITORY, copy_exercise, run, torchrun
from torch.utils.flop_counter import FlopCounterMode

NODE = platform.node().split(".")[0]
KB, MB = 2**10, 2**20
# check.py with a fault, and without long measurements.
FAULTY = """
import os, sys, time
sys.path.insert(0, "../tools")
import check
import torch.distributed as dist

def median_seconds(operation, device, slowest=float):
    operation()
    return slowest(0.001)

check.median_seconds, check.SIZES = median_seconds, (4096,)
{}
check.main()
"""
# The last rank adds a wrong number to the sum, and receives a wrong one.
WRONG = """
SUM, real_all_reduce, real_broadcast = (
    dist.ReduceOp.SUM, dist.all_reduce, dist.broadcast
)

def last_of(x):
    return x[x.numel() - (dist.get_rank() == dist.get_world_size() - 1):]

def all_reduce(x, op=SUM, group=None):
    if op == SUM:
        last_of(x).add_(1)
    real_all_reduce(x, op, group)

def broadcast(x, **options):
    real_broadcast(x, **options)
    last_of(x).add_(1)

check.dist.all_reduce, check.dist.broadcast = all_reduce, broadcast
"""


@pytest.fixture
def exercise(tmp_path):
    return copy_exercise("exercise8", tmp_path)


@pytest.fixture
def start(exercise, sample):
    """Return a function that runs check.py with a fault, and returns its results."""

    def start(fault, *options, before=(), **env):
        (exercise / "faulty.py").write_text(FAULTY.format(fault))
        command = [*before, "bash", "run-2gpus.sh", "faulty.py", *options]
        done = run(command, exercise, sample, timeout=100, **env)
        (file,) = (exercise / "logs").iterdir()
        return done, json.loads(file.read_text())

    return start


def last_line(done):
    return done.stdout.splitlines()[-1]


def test_two_processes_are_checked(exercise, sample):
    done = run(["bash", "run-2gpus.sh", "../tools/check.py"], exercise, sample)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    assert last_line(done) == "All is well." and done.stdout.count("All is") == 1
    (file,) = (exercise / "logs").iterdir()
    assert file.match("check-*.json") and file.name in done.stdout
    found = json.loads(file.read_text())
    assert found["nodes"] == [NODE] and found["backend"] == "gloo"
    assert found["problems"] == found["warnings"] == [] and found["finished"]
    for rank, process in enumerate(found["processes"]):
        assert (process["rank"], process["node"]) == (rank, NODE)
        assert process["cpu_count"] == len(os.sched_getaffinity(0))
        assert process["threads"] == 1 and process["cpus"] in done.stdout
        assert torch.__version__ in process["versions"]
        assert process["float32_tflops"] > 0 and process["bfloat16_tflops"] > 0
    assert len(found["processes"]) == 2
    for what in ("all_reduce", "broadcast"):
        sizes = [row["bytes"] for row in found[what]]
        assert sizes == [4 * KB, 64 * KB, MB, 16 * MB]
        for row in found[what]:
            assert (row["over"], row["nodes"], row["processes"]) == (NODE, 1, 2)
            # For two processes both are bytes a second: 2 (n - 1) / n is 1.
            speed = row["bytes"] / row["seconds"] / 1e9
            assert row["bus_gb_per_s"] == pytest.approx(speed) and row["correct"]
            assert re.search(
                rf"{what} .* {row['bytes']} .* {speed:.4g}", done.stdout
            )
    (data,) = found["data"]
    assert data["exercises"] == list(check.REQUIRED_FILES)
    assert data["datadir"] == str(sample) and data["read_gb_per_s"] > 0
    assert data["bytes_read"] == os.path.getsize(data["file"])


def test_missing_data_is_reported(exercise, tmp_path):
    file, none = tmp_path / "here.json", tmp_path / "none"
    done = run(["bash", "run.sh", "../tools/check.py", "--to", file], exercise, none)
    assert done.returncode == 1 and done.stderr == ""
    assert "No communication with one process" in done.stdout
    line = (
        f"Problem: {NODE} cannot read DATADIR, No such file or directory: {none}: "
    )
    assert last_line(done).startswith(line + "set DATADIR")
    found = json.loads(file.read_text())
    assert [f"Problem: {text}" for text in found["problems"]] == [last_line(done)]
    assert found["all_reduce"] == found["broadcast"] == [] and not found["backend"]
    assert not (exercise / "logs").exists()


def test_wrong_numbers_and_too_few_cpus_are_reported(start):
    cpu = min(os.sched_getaffinity(0))
    done, found = start(WRONG, before=["taskset", "--cpu-list", str(cpu)])
    assert done.returncode == 1 and done.stderr == "", done.stderr
    for what in ("all_reduce", "broadcast"):
        line = f"Problem: {what} of 4096 bytes over {NODE} gives wrong numbers: tell"
        assert line in done.stdout and [r["correct"] for r in found[what]] == [False]
    assert last_line(done).startswith(line)
    line = f"on {NODE} 2 processes with 2 threads compete for CPU {cpu}: request"
    assert f"\nWarning: {line}" in done.stdout and len(found["warnings"]) == 1


# A network on which 64 KB take 1 s: 1 MB would take five times 16 s.
SLOW = """
def slow(operation, device, slowest=float):
    operation()
    return slowest(1.0 if operation.args[0].nbytes > 4096 else 0.05)

check.median_seconds, check.SIZES = slow, (2**12, 2**16, 2**20)
os.environ["SLURMD_NODENAME"] = "n1" if int(os.environ["RANK"]) < 2 else "n2"
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
    for what in ("all_reduce", "broadcast"):
        rows = [
            (r["over"], r["nodes"], r["processes"], r["bytes"]) for r in found[what]
        ]
        assert sorted(rows) == [
            (*g, size) for g in groups for size in (2**12, 2**16)
        ]
    for row in found["all_reduce"] + found["broadcast"]:
        assert row["correct"] == (row["over"] == "n1")
    for row in found["all_reduce"]:  # 2 (n - 1) / n
        factor = {2: 1, 4: 1.5}[row["processes"]]
        speed = factor * row["bytes"] / row["seconds"] / 1e9
        assert row["bus_gb_per_s"] == pytest.approx(speed)
    assert len(found["problems"]) == 8 and "over n2" in " ".join(found["problems"])
    slow = [text for text in found["warnings"] if "than 65536 bytes over" in text]
    assert len(slow) == 3 and "SOCKET_IFNAME" in slow[0]


def test_pairs_are_neighbours_of_one_node():
    nodes = ["a", "a", "b", "a", "b", "b", "b"]
    assert check.make_pairs(nodes) == [[0, 1], [2, 4], [5, 6]]
    assert check.make_pairs(["a", "b"]) == []


HANGS = "lambda *args, **options: time.sleep(99)"


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault, words",
    [
        (
            "time.sleep(99 if os.environ['RANK'] == '1' else 0)",
            f"rank 1 on a node of this job: no answer within 3 s; ranks on {NODE}",
        ),
        (f"check.dist.init_process_group = {HANGS}", "does not connect.*IFNAME"),
        (f"check.dist.broadcast = {HANGS}", "broadcast of 4096 bytes.*IFNAME"),
    ],
)
def test_a_missing_rank_and_a_hanging_network_are_reported(fault, words, start):
    """It ends with one line, which is also the file's problem."""
    done, found = start(fault, "--wait", "3")
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    (line,) = [text for text in done.stderr.splitlines() if "rror: " in text]
    assert line == f"Error: {found['problems'][0]}" and not found["finished"]
    assert re.search(words, line), line


@pytest.mark.slow
def test_a_first_rank_that_hangs_later_is_named(start):
    rank = "dist.get_rank()"
    hangs = f"check.matmul_tflops = lambda _: time.sleep(99 * (1 - {rank})) or {{}}"
    done, found = start(hangs, "--wait", "3")
    assert done.returncode == 2 and found["all_reduce"]  # measured before
    line = f"Error: rank 0 on {NODE}: no TFLOP/s within 3 s; ranks on"
    assert f"\n{line}" in f"\n{done.stderr}" and "Traceback" not in done.stderr


@pytest.mark.parametrize("seconds", [1e-5, 1e-2, 3.0])
def test_fast_operations_are_repeated_and_slow_ones_are_not(seconds, monkeypatch):
    now, done = [0.0], []
    clock = SimpleNamespace(perf_counter=lambda: now[0])
    monkeypatch.setattr(check, "time", clock)

    def operation():  # only here time passes
        now[0] += seconds
        done.append(operation)

    measured = check.median_seconds(operation, torch.device("cpu"))
    assert measured == pytest.approx(seconds)
    assert len(done) == 5 or (len(done) > 5 and now[0] < 0.8)


def test_tflops_count_what_pytorch_counts(monkeypatch):
    def picoseconds(operation, device):  # at 1 FLOP per picosecond
        with FlopCounterMode(display=False) as counter:
            operation()
        return counter.get_total_flops() / 1e12

    monkeypatch.setattr(check, "median_seconds", picoseconds)
    assert {*check.matmul_tflops(torch.device("cpu")).values()} == {1.0}


def make_job():
    """Return a job of one process, that was never started."""
    job = object.__new__(check.Job)
    found = {"problems": [], "warnings": [], "nodes": ["n1"]}
    vars(job).update(rank=0, size=2, nodes=["n1"], found=found)
    vars(job).update(problems=found["problems"], warnings=found["warnings"])
    return job


def process(rank, gpu=None, *seen, cpus="0-3", count=4, threads=1):
    facts = {"rank": rank, "uuid": gpu, "gpus_seen": seen, "threads": threads}
    return facts | {"cpus": cpus, "cpu_count": count}


@pytest.mark.parametrize(
    "problems, warnings, here",
    [
        ("", "", [process(0), process(1)]),
        ("", "", [process(0, "a", "a", "b"), process(1, "b", "a", "b")]),
        ("", "", [process(0, "a", "a"), process(1, "b", "b")]),
        ("ranks 2, 3 .* GPU a: ", "", [process(2, "a", "a"), process(3, "a", "a")]),
        ("", "n1 has 1 unused GPUs of 2", [process(0, "a", "a", "b")]),
        ("", "", [process(0, cpus="0", count=1), process(1, cpus="1", count=1)]),
        ("", "5 threads compete for CPU 0-3", [process(0, threads=4), process(1)]),
    ],
)
def test_shared_gpus_and_cpus_are_reported(
    problems, warnings, here, capsys, monkeypatch
):
    job = make_job()
    check.check_gpu_sharing(job, "n1", here)
    for kind, words in (("problems", problems), ("warnings", warnings)):
        assert len(job.found[kind]) == bool(words)
        assert re.search(words, " ".join(job.found[kind]))
    if problems:  # then NCCL would hang
        check.check_network(job)
        assert (
            "No communication: each process needs its own GPU"
            in capsys.readouterr().out
        )


def test_exercises_with_complete_data_are_found(sample, tmp_path):
    shutil.copytree(sample, tmp_path / "data")
    (tmp_path / "data/dogs-vs-cats/test.pt").unlink()
    found = check.read_data(tmp_path / "data")
    assert found["exercises"] == [*check.REQUIRED_FILES][1:]
    assert found["error"] is None
    files = [f for f in (tmp_path / "data").rglob("*.pt") if f.is_file()]
    assert found["bytes_read"] == max(map(os.path.getsize, files))


def test_different_data_on_two_nodes_is_reported(monkeypatch, capsys):
    common = {"error": None, "datadir": "/data", "file": None}
    rows = [{"node": "n1", "exercises": ["a", "b"], **common}, None]
    rows += [{"node": "n2", "exercises": ["a"], **common}, None]
    job = make_job()
    monkeypatch.setattr(job, "gather", lambda what, row: rows)
    check.check_data(job)
    assert job.found["data"] == rows[::2]
    (warning,) = job.found["warnings"]
    assert warning.startswith("n2 and n1 have different data: set DATADIR")


def test_it_imports_only_pytorch():
    others = "tqdm", "numpy", "matplotlib", "tensorboard", "torchvision"
    code = f"import sys; sys.modules |= dict.fromkeys({others}); import check"
    done = run([sys.executable, "-c", code], REPOSITORY / "tools")
    assert done.returncode == 0, done.stderr
