"""bench/check.py, as it is used: by run scripts, on processes that really talk."""

import importlib.util
import json
import os
import platform
import re
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from conftest import REPOSITORY, copy_room, run, torchrun

NODE = platform.node().split(".")[0]
KB, MB = 2**10, 2**20
spec = importlib.util.spec_from_file_location("check", REPOSITORY / "bench/check.py")
check = importlib.util.module_from_spec(spec)
spec.loader.exec_module(check)
# check.py with something wrong, and without what takes long.
SICK = """
import os, sys, time
sys.path.insert(0, "../bench")
import check
import torch.distributed as dist

def seconds_of(do, device, slowest=float):
    do()
    return slowest(0.001)

check.seconds_of, check.SIZES = seconds_of, (4096,)
{}
check.main()
"""


@pytest.fixture
def room(tmp_path):
    return copy_room("exercise8", tmp_path)


@pytest.fixture
def sick(room, sample):
    """Return a function that runs check.py with a fault; it returns what is left."""

    def start(fault, *options, before=(), **env):
        (room / "sick.py").write_text(SICK.format(fault))
        command = [*before, "bash", "run-2gpus.sh", "sick.py", *options]
        done = run(command, room, sample, timeout=100, **env)
        (file,) = (room / "logs").iterdir()
        return done, json.loads(file.read_text())

    return start


def last_line(done):
    return done.stdout.splitlines()[-1]


def test_two_processes(room, sample):
    done = run(["bash", "run-2gpus.sh", "../bench/check.py"], room, sample)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    assert last_line(done) == "All is well." and done.stdout.count("All is") == 1
    (file,) = (room / "logs").iterdir()
    assert file.match("check-*.json") and file.name in done.stdout
    found = json.loads(file.read_text())
    assert found["torch"] == torch.__version__ and found["backend"] == "gloo"
    assert found["nodes"] == [NODE] and found["finished"]
    assert found["problems"] == found["warnings"] == []
    cpus = check.ranges(os.sched_getaffinity(0))
    for rank, process in enumerate(found["processes"]):
        assert (process["rank"], process["node"]) == (rank, NODE)
        assert (process["cpus"], process["threads"]) == (cpus, 1)
        assert process["uuid"] is None and process["memory_gb"] > 0
        assert process["float32_tflops"] > 0 and process["bfloat16_tflops"] > 0
        assert "tf32_tflops" not in process and "to_device_gb_per_s" not in process
    assert len(found["processes"]) == 2
    for what in ("all_reduce", "broadcast"):
        sizes = [row["bytes"] for row in found[what]]
        assert sizes == [4 * KB, 64 * KB, MB, 16 * MB]
        for row in found[what]:
            assert (row["over"], row["nodes"], row["processes"]) == (NODE, 1, 2)
            assert row["correct"]
            # For two processes both are bytes a second: 2 (n - 1) / n is 1.
            speed = row["bytes"] / row["seconds"] / 1e9
            assert row["bus_gb_per_s"] == pytest.approx(speed)
            assert f" {row['bytes']} " in done.stdout
    (barrier,) = found["barrier"]
    assert barrier["over"] == NODE and barrier["seconds"] > 0
    (data,) = found["data"]
    assert data["exercises"] == list(check.NEEDS)
    assert data["datadir"] == str(sample) and data["read_gb_per_s"] > 0
    assert data["bytes_read"] == os.path.getsize(data["file"])
    assert "No copies" in done.stdout


def test_one_process_without_data(room, tmp_path):
    file, none = tmp_path / "here.json", tmp_path / "none"
    done = run(["bash", "run.sh", "../bench/check.py", "--to", file], room, none)
    assert done.returncode == 1 and done.stderr == ""
    assert "One process" in done.stdout
    line = f"Wrong: {NODE} cannot read DATADIR, No such file or directory: {none}: "
    assert last_line(done).startswith(line + "`export DATADIR=")
    found = json.loads(file.read_text())
    assert [f"Wrong: {text}" for text in found["problems"]] == [last_line(done)]
    assert found["all_reduce"] == found["broadcast"] == found["barrier"] == []
    assert found["processes"][0]["float32_tflops"] > 0 and found["backend"] is None
    assert not (room / "logs").exists()


# The last rank gives a wrong number for the sum, and is sent a wrong one.
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


def test_wrong_numbers_are_found_and_a_fight_over_cpus(sick):
    cpu = min(os.sched_getaffinity(0))
    done, found = sick(WRONG, before=["taskset", "--cpu-list", str(cpu)])
    assert done.returncode == 1 and done.stderr == "", done.stderr
    line = f"Wrong: all_reduce of 4096 bytes over {NODE} gives wrong numbers: tell"
    assert last_line(done).startswith(line) and "(and 2 more, above)" in done.stdout
    assert [row["correct"] for row in found["all_reduce"]] == [False]
    assert [row["correct"] for row in found["broadcast"]] == [False]
    line = f"on {NODE} 2 processes with 2 threads fight over CPU {cpu}: ask for more"
    assert found["warnings"][0].startswith(line)
    assert f"\nWarning: {line}" in done.stdout and len(found["warnings"]) == 1


ONE_GPU = """
place = check.place
def on_a_gpu(*args):
    mine, other = ["GPU-1", "0000:01:00.0"], ["GPU-2", "0000:02:00.0"]
    gpu = {"uuid": mine[0], "pci": mine[1], "gpus_seen": [mine, other]}
    return place(*args) | gpu
check.place = on_a_gpu
check.dist.init_process_group = None  # not to be called
"""


@pytest.mark.slow
def test_two_processes_with_one_gpu(sick):
    done, found = sick(ONE_GPU)
    assert done.returncode == 1 and done.stderr == "", done.stderr
    line = f"Wrong: ranks 0-1 on {NODE} have one GPU, GPU-1: start one torchrun"
    assert last_line(done).startswith(line) and "(and 1 more, above)" in done.stdout
    assert f"\nWarning: nobody uses 1 of the 2 GPUs seen on {NODE}" in done.stdout
    assert found["all_reduce"] == [] and found["finished"]


@pytest.mark.slow
def test_two_nodes_of_two_processes(room, sample):
    """Four processes here play them. Within the second one something is wrong."""
    name = "'n1' if int(os.environ['RANK']) < 2 else 'n2'"
    fault = f"{WRONG}os.environ['SLURMD_NODENAME'] = {name}"
    (room / "sick.py").write_text(SICK.format(fault))
    done = torchrun(4, ["sick.py", "--to", "out.json"], room, sample)
    assert done.returncode == 1, done.stderr
    found = json.loads((room / "out.json").read_text())
    assert found["nodes"] == [row["node"] for row in found["data"]] == ["n1", "n2"]
    for what in ("all_reduce", "broadcast", "barrier"):
        groups = [(r["over"], r["nodes"], r["processes"]) for r in found[what]]
        assert sorted(groups) == [("all", 2, 4), ("n1", 1, 2), ("n2", 1, 2)]
    for row in found["all_reduce"] + found["broadcast"]:
        assert row["correct"] == (row["over"] == "n1")
    for row in found["all_reduce"]:  # 2 (n - 1) / n
        factor = {2: 1, 4: 1.5}[row["processes"]]
        speed = factor * row["bytes"] / row["seconds"] / 1e9
        assert row["bus_gb_per_s"] == pytest.approx(speed)
    assert len(found["problems"]) == 4 and "over n2" in " ".join(found["problems"])


def gives_up(done, found, *words):
    """It ended with one line, which is the last in the file, too."""
    assert done.returncode == 2, done.stderr
    (line,) = [text for text in done.stderr.splitlines() if "rror: " in text]
    assert all(word in line for word in words), line
    assert line == f"Error: {found['problems'][0]}" and not found["finished"]
    assert "Traceback" not in done.stderr


def test_a_rank_that_does_not_come_is_named(sick):
    late = "time.sleep(99 if os.environ['RANK'] == '1' else 0)"
    done, found = sick(late, "--wait", "2")
    gives_up(done, found, f"rank 1 on {NODE}: no sign of life within 2 s. See")
    assert done.stderr.count("\n") == 1 and done.stdout == ""


@pytest.mark.slow
def test_so_is_one_that_hangs_later(sick):
    hangs = (
        "check.copies = lambda device: time.sleep(99 * (1 - dist.get_rank())) or {}"
    )
    done, found = sick(hangs, "--wait", "3")
    assert done.returncode == 2 and found["all_reduce"]  # measured before
    line = f"Error: rank 0 on {NODE}: no speeds within 3 s. See"
    assert done.stderr.startswith(line) and done.stderr.count("\n") == 1


@pytest.mark.slow
def test_a_network_that_is_not_there(sick):
    done, found = sick("", GLOO_SOCKET_IFNAME="none0")
    gives_up(done, found, "gloo does not connect", NODE, "none0", "SOCKET_IFNAME")
    assert len(found["processes"]) == 2


@pytest.mark.slow
@pytest.mark.parametrize("what", ["init_process_group", "broadcast", "barrier"])
def test_what_hangs_is_named(what, sick):
    hangs = f"check.dist.{what} = lambda *args, **options: time.sleep(99)"
    done, found = sick(hangs, "--wait", "3")
    name = "does not connect" if what == "init_process_group" else what
    gives_up(done, found, name, "no end after 3 s", "SOCKET_IFNAME")


def test_where_nothing_can_be_written(room, sample):
    (room / "logs").write_text("")
    done = run(["bash", "run.sh", "../bench/check.py"], room, sample)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("Error: cannot write logs/check-")
    assert "--to FILE" in done.stderr and done.stderr.count("\n") == 1


def test_figures_and_lists_of_cpus():
    figures = {None: "-", 0.012345: "0.0123", 123.45: "123", 1234.5: "1234", 7: "7"}
    assert {x: check.figure(x) for x in figures} == figures
    lists = {"0": {0}, "0-2,8": {0, 1, 2, 8}, "1,3-4": {1, 3, 4}}
    for text, numbers in lists.items():
        assert check.ranges(numbers) == text and check.numbers(text) == numbers


def test_bus_bandwidth():
    """As nccl-tests define it: of 8 ranks each link carries 14 / 8 of the bytes."""
    size, seconds = 128 * MB, 1e-3
    speed = check.bus_bandwidth("all_reduce", 8, size, seconds)
    assert speed == pytest.approx(134.217728 * 1.75)
    speed = check.bus_bandwidth("broadcast", 8, size, seconds)
    assert speed == pytest.approx(134.217728)


@pytest.mark.parametrize("seconds", [1e-5, 1e-2, 0.2, 3.0])
def test_repeats(seconds, monkeypatch):
    now, done = [0.0], []
    clock = SimpleNamespace(perf_counter=lambda: now[0])
    monkeypatch.setattr(check, "time", clock)

    def do():  # time passes here alone
        now[0] += seconds
        done.append(do)

    measured = check.seconds_of(do, torch.device("cpu"))
    assert measured == pytest.approx(seconds)
    assert len(done) == 4 or (len(done) > 4 and now[0] < 0.8)


def job(**fields):
    """Return a job of one process, that was never started."""
    made = object.__new__(check.Job)
    found = {"problems": [], "warnings": [], "all_reduce": [], "broadcast": []}
    found |= {"barrier": [], "backend": "gloo", "nodes": ["n1"]}
    vars(made).update(rank=0, size=1, wait=9, nodes=["n1"], found=found)
    vars(made).update(store=dist.HashStore(), device=torch.device("cpu"))
    vars(made).update(sizes=check.SIZES[:4], **fields)
    return made


def process(rank, gpu=(None, None), *seen, cpus="0-3", threads=1):
    facts = {"rank": rank, "uuid": gpu[0], "pci": gpu[1], "cpus": cpus}
    return facts | {"gpus_seen": [list(gpu) for gpu in seen], "threads": threads}


A, B, OLD = ("GPU-a", "0:1"), ("GPU-b", "0:2"), (None, None)


@pytest.mark.parametrize(
    "problems, warnings, here",
    [
        ("", "", [process(0), process(1)]),
        ("", "", [process(0, A, A, B), process(1, B, A, B)]),
        ("", "", [process(0, A, A), process(1, B, B)]),
        ("ranks 2-3 .* GPU-a", "", [process(2, A, A), process(3, A, A)]),
        ("", "nobody uses 1 of the 2 GPUs seen on n1", [process(0, A, A, B)]),
        ("", "", [process(0, OLD, OLD), process(1, OLD, OLD)]),
        ("", "", [process(0, cpus="0"), process(1, cpus="1")]),
        ("", "4 threads fight over CPU 0-1", [process(0, cpus="0-1", threads=4)]),
    ],
)
def test_places(problems, warnings, here):
    checked = job()
    check.judge_places(checked, "n1", here)
    for kind, words in (("problems", problems), ("warnings", warnings)):
        assert len(checked.found[kind]) == bool(words)
        assert re.search(words, " ".join(checked.found[kind]))


def test_processes_that_share_a_gpu_do_not_talk(monkeypatch, capsys):
    monkeypatch.setattr(check, "connect", None)
    checked = job(size=2)
    checked.found["problems"].append("they share one")
    check.talk(checked)
    assert "Nothing was sent: each process needs a GPU" in capsys.readouterr().out


@pytest.mark.parametrize(
    "nodes, named",
    [
        ({0: "n1", 1: "n1"}, "rank 2 on n2, rank 3 on n2: "),
        ({0: "n1", 2: "n2"}, "rank 1 on n1, rank 3 on n2: "),
        ({2: "n2", 3: "n2"}, "rank 0 on n1, rank 1 on n1: "),
    ],
)
def test_where_a_missing_rank_should_be(nodes, named, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("JOB_NODES", "n1\nn2")
    checked = job(size=4)
    for rank, node in nodes.items():
        checked.store.set(f"sign of life/{rank}", json.dumps(node))
    assert checked.missing("sign of life", list(nodes)).startswith(named)
    # Later all have said where they are, whatever the order of nodes.
    for rank, node in enumerate(("n2", "n2", "n1", "n1")):
        checked.store.set(f"sign of life/{rank}", json.dumps(node))
    assert checked.missing("data", [0, 2, 3]).startswith("rank 1 on n2: no data")


def test_a_slow_network_does_not_take_minutes(monkeypatch, capsys):
    """Where 64 KB take 1 s, 1 MB would take five times 16 s."""
    monkeypatch.setattr(check, "connect", lambda job: [([0], None)])
    seconds = {4 * KB: 0.05, 64 * KB: 1.0}

    def seconds_of(do, device, slowest):
        return seconds[do.args[0].nbytes] if do.args[0] is not None else 0.01

    monkeypatch.setattr(check, "seconds_of", seconds_of)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        checked = job(size=2)
        monkeypatch.setattr(checked, "gather", lambda what, rows: [rows, []])
        check.talk(checked)
    finally:
        dist.destroy_process_group()
    for what in ("all_reduce", "broadcast"):
        sizes = [row["bytes"] for row in checked.found[what]]
        assert sizes == [4 * KB, 64 * KB]
    (warning,) = checked.found["warnings"]
    assert warning.startswith("too slow for more than 65536 bytes over n1: ")
    assert checked.found["problems"] == []


@pytest.mark.parametrize(
    "missing, there",
    [
        ([], [*check.NEEDS]),
        (["dogs-vs-cats/test-150.pt"], [*check.NEEDS][1:]),
        (["MNIST", "CINIC", "cifar-100-python"], ["exercise8", "dp_ddp_intro"]),
        (
            ["dogs-vs-cats", "CINIC"],
            ["mnist_multigpu", "cifar100_demo", "dp_ddp_intro"],
        ),
    ],
)
def test_data(missing, there, sample, tmp_path):
    for folder in sample.iterdir():
        (tmp_path / folder.name).mkdir()
        for file in folder.iterdir():
            name = f"{folder.name}/{file.name}"
            if not {name, folder.name} & {*missing}:
                (tmp_path / name).symlink_to(file)
    for name in missing:
        if (tmp_path / name).exists():
            (tmp_path / name).rmdir()
    found = check.read_data(tmp_path)
    assert found["exercises"] == there and found["error"] is None
    files = [f for f in tmp_path.rglob("*") if f.is_file()]
    files += [f for f in tmp_path.glob("MNIST/raw/*") if f.is_file()]
    assert found["bytes_read"] == max(map(os.path.getsize, files))


def test_data_that_cannot_be_read(tmp_path):
    found = check.read_data(tmp_path)
    assert found["error"] is None and found["file"] is None
    (tmp_path / "file").write_text("")
    found = check.read_data(tmp_path / "file")
    assert found["error"] == f"Not a directory: {tmp_path / 'file'}"


def test_nodes_whose_data_differ(monkeypatch, capsys):
    rows = [{"node": "n1", "exercises": ["a", "b"], "error": None}, None]
    rows += [{"node": "n2", "exercises": ["a"], "error": None}, None]
    checked = job(nodes=["n1", "n1", "n2", "n2"])
    monkeypatch.setattr(checked, "gather", lambda what, row: rows)
    check.look_at_data(checked)
    assert checked.found["data"] == rows[::2]
    (warning,) = checked.found["warnings"]
    assert warning.startswith("n2 has other data than n1: `export DATADIR=`")


def test_what_is_said_of_a_gpu(monkeypatch):
    """As CUDA and ROCm describe one, and as Intel's do in torch 2.8."""
    pci = {"pci_domain_id": 0, "pci_bus_id": 0xC1, "pci_device_id": 0}
    gpus = [
        SimpleNamespace(name="GPU", total_memory=80e9, uuid="1a2b", **pci),
        SimpleNamespace(name="Max", total_memory=64e9),
    ]
    module = SimpleNamespace(get_device_properties=gpus.__getitem__)
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: len(gpus))
    first, second = (check.place(0, torch.device("cuda", n)) for n in (0, 1))
    assert (first["device"], first["memory_gb"]) == ("GPU", 80)
    assert (first["uuid"], first["pci"]) == ("1a2b", "0000:c1:00.0")
    assert first["gpus_seen"] == [["1a2b", "0000:c1:00.0"], [None, None]]
    assert (second["device"], second["uuid"], second["pci"]) == ("Max", None, None)


def test_it_needs_nothing_beyond_pytorch():
    others = "tqdm", "numpy", "matplotlib", "tensorboard", "torchvision"
    code = f"import sys; sys.modules |= dict.fromkeys({others}); import check"
    done = run([sys.executable, "-c", code], REPOSITORY / "bench")
    assert done.returncode == 0, done.stderr
