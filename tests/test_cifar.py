"""cifar100_demo/: three scripts, their profile, monitor and plots, their errors."""

import csv
import hashlib
import json
import os
import re
import shutil
import stat
import sys
import tarfile
import textwrap
import time
from argparse import Namespace
from itertools import chain, pairwise
from statistics import median

import pytest
import torch
from compare import compare, read_runs
from conftest import (
    REPOSITORY,
    call,
    copy_room,
    load,
    mistake,
    run,
    serving,
    torchrun,
)
from test_steps import Watch

from common.log import RunLog

FOLDER = REPOSITORY / "cifar100_demo"
QUICK = ("--arch", "resnet18", "--image-size", "40", "--batch-size", "16")


@pytest.fixture
def room(tmp_path):
    return copy_room("cifar100_demo", tmp_path)


def scalars(room):
    """Return {tag: values} of the one run in logs/."""
    from tensorboard.backend.event_processing.event_accumulator import (
        EventAccumulator,
    )

    (file,) = (path for path in room.rglob("*") if "tfevents" in path.name)
    events = EventAccumulator(str(file))
    events.Reload()
    tags = events.Tags()["scalars"]
    return {tag: [event.value for event in events.Scalars(tag)] for tag in tags}


def check(done, room, processes, steps):
    """Check what a run of two epochs printed and left; return its result."""
    assert done.returncode == 0 and done.stderr == "", done.stderr
    for epoch in (1, 2):
        assert re.search(
            rf"^Epoch {epoch} \[{steps}/{steps}\]: loss [\d.]+, "
            r"[\d.]+ ms per iteration, [\d.]+ images/s, [\d.]+ GB$",
            done.stdout,
            re.M,
        )
        assert re.search(
            rf"^Epoch {epoch}: [\d.]+ s, [\d.]+ images/s; step ms [\d.]+ GB [\d.]+; "
            r"train loss [\d.]+ "
            r"accuracy [\d.]+ %; validation loss [\d.]+ accuracy [\d.]+ %$",
            done.stdout,
            re.M,
        )
    assert re.search(
        r"^First epoch: [\d.]+ s; later ones: [\d.]+ s$", done.stdout, re.M
    )
    (result,) = map(json.loads, (room / "logs/results.jsonl").open())
    assert result["gpus"] == processes
    assert result["images_per_epoch"] == steps * 16 * processes
    return result


def test_one_gpu_with_its_profile_monitor_and_plots(room, sample, monkeypatch):
    command = ["bash", "run_single_cifar.sh", *QUICK, "--epochs", "2"]
    done = run([*command, "--steps", "20"], room, sample)
    result = check(done, room, 1, 20)
    # The loss falls on drawn shapes, and TensorBoard has it.
    first, second = scalars(room)["train/loss"]
    assert first > second + 0.1
    assert len(scalars(room)["iterations/loss"]) == 20  # ten in an epoch
    assert len(re.findall(r"^Epoch 1 \[\d+/20\]", done.stdout, re.M)) == 10
    # The profile: three steps, and the costliest operator first in the table.
    trace = json.loads((room / "logs/profiler/trace.json").read_text())
    names = {event["name"] for event in trace["traceEvents"]}
    steps = {name for name in names if name.startswith("ProfilerStep")}
    assert steps == {"ProfilerStep#5", "ProfilerStep#6", "ProfilerStep#7"}
    table = done.stdout[done.stdout.index("Self CPU %") :].splitlines()
    assert "aten::convolution_backward" in table[2]
    assert "All-reduces" not in done.stdout
    # The monitor: every second, and gone with the job.
    (file,) = room.glob("logs/utilisation-*.csv")
    rows = list(csv.DictReader(file.open()))
    times = [float(row["time"]) for row in rows]
    assert times[-1] - times[0] > result["training_seconds"] / 2
    assert 0.9 < median(b - a for a, b in pairwise(times)) < 2
    assert all(row["device"] == "CPU" and row["power_w"] == "" for row in rows)
    used = max(float(row["utilisation_percent"]) for row in rows)
    assert used > 50 / len(os.sched_getaffinity(0))  # one core of them
    assert not processes_in(room)
    monkeypatch.chdir(room)
    monkeypatch.setenv("DATADIR", str(sample))
    for script in ("plot_utilisation", "plot_trace", "plot_images"):
        call(load("cifar100_demo", script))
    plot_utilisation = load("cifar100_demo", "plot_utilisation")
    (found,) = plot_utilisation.read_runs(times[0], times[-1] + 2, file)
    assert len(found["epoch_ends"]) == 2
    assert times[0] < found["epoch_ends"][0] < found["epoch_ends"][1]
    pictures = {"utilisation.png", "trace.png", "images.png"}
    assert pictures <= {path.name for path in (room / "logs").iterdir()}


def processes_in(folder):
    """Return the processes that run in a folder."""
    found = []
    for process in os.listdir("/proc"):
        try:
            if os.readlink(f"/proc/{process}/cwd") == str(folder):
                found.append(process)
        except OSError:
            pass
    return found


def test_ddp_writes_a_trace_for_each_rank(room, sample):
    command = ["bash", "run_ddp_cifar100.sh", *QUICK, "--epochs", "2", "--amp"]
    done = run([*command, "--steps", "4"], room, sample)
    check(done, room, 2, 4)
    traces = sorted(path.name for path in (room / "logs/profiler").iterdir())
    assert traces == ["trace_rank0.json", "trace_rank1.json"]
    assert done.stdout.count("Self CPU time total") == 1
    assert done.stdout.count("\nAll-reduces ") == 1
    assert len(scalars(room)["train/loss"]) == 2
    assert not processes_in(room)
    single = ["bash", "run_single_cifar.sh", *QUICK, "--epochs", "1", "--amp"]
    done = run([*single, "--steps", "2", "--no-profile"], room, sample)
    assert done.returncode == 0, done.stderr
    groups = compare(read_runs([room / "logs/results.jsonl"]))
    ((one, two),) = groups.values()  # though an epoch of theirs differs
    assert (one["gpus"], two["gpus"]) == (1, 2) and two["speedup"] > 0


@pytest.mark.slow
def test_ddp_prints_its_all_reduces(room, sample):
    command = ["bash", "run_ddp_cifar100.sh", *QUICK, "--epochs", "1"]
    done = run([*command, "--steps", "9"], room, sample)
    assert done.returncode == 0, done.stderr
    table = done.stdout[done.stdout.index("\nAll-reduces ") :].splitlines()[1:5]
    assert re.fullmatch(r"All-reduces +Number +CPU ms", table[0])
    # In each of three steps those of three buckets, and one for the line.
    assert re.fullmatch(r"c10d::allreduce_ +12 +[\d.]+", table[1])
    assert re.fullmatch(r"gloo:all_reduce +12 +[\d.]+", table[2])
    assert table[3] == "Trace saved to logs/profiler/trace_rank0.json"


@pytest.mark.parametrize(
    "steps, due",
    [
        (4, [1, 2, 3, 4]),
        (25, [3, 6, 9, 12, 15, 18, 21, 24, 25]),
        (2005, [*range(100, 2001, 100), 2005]),
    ],
)
def test_a_line_is_due_each_tenth_of_an_epoch_or_sooner(steps, due):
    is_due = load("cifar100_demo", "report").is_due
    assert [step for step in range(1, steps + 1) if is_due(step, steps)] == due


def test_data_parallel_without_a_profile(room, sample):
    command = ["bash", "run_data_parallel_cifar100.sh", *QUICK, "--epochs", "2"]
    done = run([*command, "--steps", "2", "--no-profile"], room, sample)
    check(done, room, 1, 2)
    assert "Self CPU" not in done.stdout and not (room / "logs/profiler").exists()


@pytest.mark.slow
def test_shares_buffers_and_gradients_of_three_processes(sample, tmp_path):
    one, three = tmp_path / "one", tmp_path / "three"
    for folder in (one, three):
        folder.mkdir()
        (folder / "common").symlink_to(REPOSITORY / "common")
    spy = REPOSITORY / "tests/spy_cifar.py"
    options = [*QUICK, "--epochs", "2", "--no-profile"]
    script, ddp = FOLDER / "train_cifar100.py", FOLDER / "train_ddp_cifar100.py"
    done = run([sys.executable, spy, script, *options], one, sample)
    assert done.returncode == 0, done.stderr
    done = torchrun(3, [spy, ddp, *options], three, sample)
    assert done.returncode == 0, done.stderr
    alone = torch.load(one / "0.pt")
    ranks = [torch.load(three / f"{rank}.pt") for rank in range(3)]
    # 500 images to train and 100 to validate: neither can be split into three.
    for epoch in (0, 1):
        dealt = list(chain(*(rank["orders"][epoch] for rank in ranks)))
        assert set(dealt) == set(range(500)) and len(dealt) == 501
        evaluated = [rank["evaluated"][epoch] for rank in ranks]
        assert sorted(chain(*(share for share, _ in evaluated))) == [*range(100)]
        for _, result in evaluated:  # that of rank 0's buffers, which nobody moved
            assert result["accuracy"] == alone["evaluated"][epoch][1]["accuracy"]
            assert result["loss"] == pytest.approx(
                alone["evaluated"][epoch][1]["loss"]
            )
        for name, buffer in ranks[0]["buffers"][epoch].items():
            assert torch.equal(buffer, alone["buffers"][epoch][name])
            for rank in ranks[1:]:
                assert torch.equal(buffer, rank["buffers"][epoch][name])
    assert ranks[0]["orders"][0] != ranks[0]["orders"][1]
    assert len({rank["random"][0] for rank in ranks}) == 3
    # Four steps on a global batch of 12.
    name = "resnet.layer4.1.conv2.weight"
    assert (alone["after"][name] - alone["before"][name]).abs().max() > 1e-4
    for name, value in alone["after"].items():
        for rank in ranks:
            torch.testing.assert_close(rank["after"][name], value, rtol=0, atol=1e-4)
            assert torch.equal(rank["after"][name], ranks[0]["after"][name])
    for rank in ranks:
        assert rank["loss"] == pytest.approx(alone["loss"], abs=1e-4)


def test_resized_on_the_device_as_torchvision_does_it(sample, monkeypatch):
    from torchvision import transforms

    module = load("cifar100_demo", "train_cifar100")

    monkeypatch.setenv("DATADIR", str(sample))
    images, _ = module.cifar100()[0].__getitems__(range(8))
    model = module.Classifier("resnet18", 224, None)
    model.resnet = torch.nn.Identity()
    output = model(images)
    resize = transforms.Compose(
        [
            transforms.ToPILImage(),
            transforms.Resize(224),
            transforms.ToTensor(),
            transforms.Normalize(module.MEAN, module.STD),
        ]
    )
    expected = torch.stack([resize(image) for image in images])
    deviation = torch.tensor(module.STD)[:, None, None]
    difference = ((output - expected) * deviation * 255).abs()
    assert difference.mean() < 2 and difference.max() < 2


def test_amp_computes_in_bfloat16_and_returns_floats():
    module = load("cifar100_demo", "train_cifar100")

    for dtype, kind in ((torch.bfloat16, torch.bfloat16), (None, torch.float32)):
        model, kinds = module.Classifier("resnet18", 40, dtype), []
        model.resnet.fc.register_forward_hook(
            lambda layer, given, output, kinds=kinds: kinds.append(output.dtype)
        )
        output = model(torch.zeros(2, 3, 32, 32, dtype=torch.uint8))
        assert kinds == [kind] and output.dtype == torch.float32


def test_nothing_in_a_step_waits_for_the_device():
    module = load("cifar100_demo", "train_cifar100")

    model = module.Classifier("resnet18", 40, torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    scaler = torch.GradScaler("cpu", enabled=False)
    images = torch.zeros(2, 3, 32, 32, dtype=torch.uint8)
    batches = [(images, torch.ones(2).long())] * 3
    args = Namespace(steps=3, batch_size=2)
    with Watch() as watch:
        for _ in range(2):  # the first epoch fills caches
            watch.waits.clear()
            cpu = torch.device("cpu")
            log = RunLog(args, cpu, enabled=False)
            module.train(args, model, cpu, batches, optimizer, scaler, log, None)
    assert watch.waits == []


def cifar100():
    return load("cifar100_demo", "dataset").cifar100()


def test_sample_files_are_cifar100s(sample, monkeypatch):
    from torchvision.datasets import CIFAR100

    monkeypatch.setenv("DATADIR", str(sample))
    monkeypatch.setattr(CIFAR100, "_check_integrity", lambda self: True)
    monkeypatch.setattr(
        "torchvision.datasets.cifar.check_integrity", lambda *a: True
    )
    for train, ours in zip((True, False), cifar100(), strict=True):
        its = CIFAR100(sample, train=train)
        assert len(its) == len(ours) == (500 if train else 100)
        images, labels = ours.__getitems__([3, 50])
        assert labels.tolist() == [its[3][1], its[50][1]]
        pixels = torch.from_numpy(its.data[[3, 50]]).permute(0, 3, 1, 2)
        assert torch.equal(images, pixels)
        assert set(ours.labels.tolist()) == set(range(100))


def test_parameters_and_flops_are_torchvisions():
    from torchvision import models

    get_parameters = load("cifar100_demo", "get_parameters")

    for arch in ("resnet18", "resnet152"):
        meta = models.get_model_weights(arch)["IMAGENET1K_V1"].meta
        counts = get_parameters.count(arch, 2, 224, classes=1000)
        assert counts["parameters"] == meta["num_params"]
        # It counts multiply-accumulates, in billions.
        assert counts["forward"] / 2e9 == pytest.approx(meta["_ops"], rel=1e-3)
        assert 2.9 < counts["training"] / counts["forward"] < 3


def test_the_texts_say_what_get_parameters_prints(capsys):
    get_parameters = load("cifar100_demo", "get_parameters")
    readme = (FOLDER / "README.md").read_text()
    answers = (FOLDER / "ANSWERS.md").read_text()
    call(get_parameters)
    assert textwrap.indent(capsys.readouterr().out, "    ") in readme
    sizes, memory = re.search(
        r"\| `--batch-size` \|(.+)\|\n.+\n.+memory in GB \|(.+)\|", answers
    ).groups()
    for size, gigabytes in zip(sizes.split("|"), memory.split("|"), strict=True):
        counts = get_parameters.count("resnet152", int(size), 224)
        all_of_it = 3 * 4 * counts["parameters"] + counts["activations"]
        assert float(gigabytes) == round(all_of_it / 1e9, 1)


def test_activations_are_what_autograd_keeps():
    from torchvision import models

    get_parameters = load("cifar100_demo", "get_parameters")

    model, kept = models.resnet18(num_classes=100), {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = model(torch.randn(3, 3, 64, 64))
        torch.nn.functional.cross_entropy(output, torch.zeros(3).long())
    for parameter in model.parameters():
        kept.pop(parameter.untyped_storage().data_ptr(), None)
    counted = get_parameters.count("resnet18", 3, 64)["activations"]
    assert counted == sum(storage.nbytes() for storage in kept.values())


def test_flops_have_the_unit_of_their_size():
    in_units = load("cifar100_demo", "get_parameters").in_units
    for flop, text in (
        (5e4, "0.05 MFLOP"),
        (168_190_000, "168.19 MFLOP"),
        (1e9, "1.00 GFLOP"),
        (3.98e12, "3.98 TFLOP"),
        (7e18, "7000.00 PFLOP"),
    ):
        assert in_units(flop) == text


def event(name, start, length, tid, cat, pid=7, **args):
    """Return an event of a trace, from ms."""
    times = {"ts": 1e6 + 1e3 * start, "dur": 1e3 * length}
    return {"ph": "X", "name": name, "cat": cat, "pid": pid, "tid": tid} | {
        **times,
        "args": args,
    }


def gpu_trace():
    """Return a trace as torch.profiler writes it on a GPU: the GPU is late."""
    note, gpu = "user_annotation", {"cat": "kernel", "pid": 0}
    launch = {"name": "cudaLaunchKernel", "cat": "cuda_runtime", "length": 0.1}
    events = [
        event("ProfilerStep#6", -20, 20, 7, note),
        event("ProfilerStep#7", 0, 20, 7, note),
        event("ProfilerStep#7", 2, 38, 7, "gpu_user_annotation", pid=0),
        event("Activity Buffer Request", 1, 1, 0, "overhead", pid=-1),
        event("aten::cudnn_convolution", 0, 2, 7, "cpu_op"),
        event("autograd::engine::evaluate_function: X", 4, 8, 9, "cpu_op"),
        event("nccl:all_reduce", 6, 0.5, 9, note),
        event("Optimizer.step#SGD.step", 14, 4, 7, note),
        event(start=1, tid=7, correlation=1, **launch),
        event(start=5, tid=9, correlation=2, **launch),
        event(start=6, tid=9, correlation=3, **launch),
        event(start=15, tid=7, correlation=4, **launch),
        event("late, of step 6", 0, 2, 7, correlation=99, **gpu),
        event("cudnn::implicit_gemm", 3, 7, 7, correlation=1, **gpu),
        event("sm90_dgrad_fprop", 10, 18, 7, correlation=2, **gpu),
        event("ncclDevKernel_AllReduce_Sum", 24, 9, 20, correlation=3, **gpu),
        event("multi_tensor_apply<FusedSgd>", 33, 4, 7, correlation=4, **gpu),
        event("Memcpy HtoD", 2, 1, 22, "gpu_memcpy", pid=0, correlation=98),
        {"ph": "M", "name": "thread_name", "pid": 0, "tid": 7, "ts": 0},
    ]
    return {"traceEvents": events, "distributedInfo": {"rank": 1}}


def test_plot_of_a_gpus_trace(tmp_path):
    plot_trace = load("cifar100_demo", "plot_trace")
    file = tmp_path / "trace.json"
    file.write_text(json.dumps(gpu_trace()))
    events, process = plot_trace.read_trace(file)
    assert process == "rank 1" and min(e["ts"] for e in events) == 0
    assert not {e["name"] for e in events} & {"ProfilerStep#6", "thread_name"}
    roles = {
        (pid, tid): plot_trace.role([e for e in events if e["tid"] == tid])
        for pid, tid in {(e["pid"], e["tid"]) for e in events}
        if tid != 7  # the number of the main thread, and of a stream
    }
    assert roles == {
        (7, 9): "backward (autograd) thread",
        (0, 20): "GPU 0, stream 20: NCCL",
        (0, 22): "GPU 0, stream 22: copies",
    }
    on_gpu = [e for e in events if (e["pid"], e["tid"]) == (0, 7)]
    assert plot_trace.role(on_gpu) == "GPU 0, stream 7: computes"
    calls = plot_trace.phases_of_calls(events)
    expected = {"forward": (0, 4), "backward": (4, 12), "optimizer": (14, 18)}
    assert calls == expected
    # The work is done later, and the last all-reduce is of the backward pass.
    kernels = plot_trace.phases_of_kernels(events, calls)
    expected = {"forward": (3, 10), "backward": (10, 33), "optimizer": (33, 37)}
    assert kernels == expected
    plot_trace.draw(events, process, tmp_path / "trace.png")
    assert (tmp_path / "trace.png").stat().st_size > 10_000


def test_what_is_below_was_called_by_what_is_above():
    plot_trace = load("cifar100_demo", "plot_trace")
    rows = [("a", 0, 9), ("conv", 0, 4), ("c", 1, 1), ("d", 5, 2), ("gloo:x", 9, 3)]
    found = plot_trace.bars(
        [{"name": name, "ts": start, "dur": length} for name, start, length in rows]
    )
    assert found == {
        (0, "other"): [(0, 9)],
        (1, "convolution"): [(0, 4)],
        (2, "other"): [(1, 1)],
        (1, "other"): [(5, 2)],
        (0, "communication"): [(9, 3)],
    }


@pytest.mark.parametrize("script", ["plot_trace", "plot_utilisation"])
def test_plots_before_there_is_a_run(script, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with mistake("type `bash run_single_cifar.sh`"):
        call(load("cifar100_demo", script))


ANSWERS = {
    "nvidia-smi": (
        "index, utilization.gpu [%], memory.used [MiB], power.draw [W]\n"
        "0, 97, 40000, 301.52\n1, 5, 4, [N/A]\n",
        [("GPU 0", 97, 41.943, 301.52), ("GPU 1", 5, 0.004, "")],
    ),
    "rocm-smi": (
        "WARNING: AMD GPU device(s) is/are in a low-power state\n\n"
        "device,Current Socket Graphics Package Power (W),GPU use (%),"
        "VRAM Total Memory (B),VRAM Total Used Memory (B)\n"
        "card0,100.0,97,17163091968,8581545984\n",
        [("GPU 0", 97, 8.582, 100)],
    ),
    "amd-smi": (
        "gpu,gfx_activity,umc_activity,socket_power,total_vram,used_vram\n"
        "0,37,1,55,16384,4096\n",
        [("GPU 0", 37, 4.295, 55)],
    ),
}


@pytest.mark.parametrize("tool", ANSWERS)
def test_monitor_asks_the_tool_that_is_there(tool, tmp_path):
    answer, rows = ANSWERS[tool]
    file = tmp_path / tool
    file.write_text(
        f"#!/bin/sh\necho \"$@\" > '{tmp_path}/asked'\ncat <<'E'\n{answer}E\n"
    )
    file.chmod(file.stat().st_mode | stat.S_IXUSR)
    path = f"{tmp_path}:{os.environ['PATH']}"
    code = (
        "import csv, monitor, sys; sys.argv = ['', 'out.csv']\n"
        "monitor.time.sleep = lambda seconds: sys.exit()\nmonitor.main()"
    )
    env = {"PATH": path, "PYTHONPATH": str(FOLDER), "CUDA_VISIBLE_DEVICES": "0,1"}
    env["SLURM_JOB_GPUS"] = "2,3"  # as AMD's tools count them
    done = run([sys.executable, "-c", code], tmp_path, **env)
    assert done.returncode == 0, done.stderr
    written = [tuple(row) for row in csv.reader((tmp_path / "out.csv").open())]
    assert written[0][0] == "time" and len(written) == 1 + len(rows)
    for row, (device, *values) in zip(written[1:], rows, strict=True):
        assert row[1] == device and abs(float(row[0]) - time.time()) < 60
        assert [float(v) if v else "" for v in row[2:]] == values
    if tool == "nvidia-smi":  # it shows all, also those of others
        run(
            [sys.executable, "-c", code],
            tmp_path,
            **{**env, "CUDA_VISIBLE_DEVICES": "1"},
        )
        written = [row[1] for row in csv.reader((tmp_path / "out.csv").open())]
        assert written == ["device", "GPU 1"]
    only = {"nvidia-smi": "", "amd-smi": "--gpu 2 3", "rocm-smi": "--device 2 3"}
    assert only[tool] in (tmp_path / "asked").read_text()
    (tmp_path / "asked").unlink()
    env["CUDA_VISIBLE_DEVICES"] = "-1"  # hidden, so it asks of the CPU
    run([sys.executable, "-c", code], tmp_path, **env)
    assert not (tmp_path / "asked").exists()


@pytest.mark.parametrize(
    "script, options, words",
    [
        ("train_cifar100", ["--image-size", "8"], "--image-size"),
        ("train_cifar100", [], r"no data .* `python download_data.py`"),
        ("train_ddp_cifar100", [], "torchrun"),
        ("plot_trace", ["none"], "cannot read none"),
        ("plot_utilisation", ["none"], "none"),
    ],
)
def test_mistakes(script, options, words, tmp_path, monkeypatch):
    monkeypatch.setenv("DATADIR", str(tmp_path))
    with mistake(words):
        call(load("cifar100_demo", script), *options)


def test_the_monitor_ends_with_a_job_that_fails(room, sample):
    (room / "logs").write_text("in the way")  # so it fails, too, and is silent
    done = run(["bash", "run_single_cifar.sh", *QUICK], room, sample)
    assert done.returncode == 2 and done.stdout == "", done.stderr
    assert done.stderr == "Error: cannot write logs/: File exists\n"
    assert not processes_in(room)


@pytest.mark.parametrize("size", [0, 1000, -1])
def test_damaged_data(size, sample, tmp_path, monkeypatch):
    monkeypatch.setenv("DATADIR", str(tmp_path))
    folder = tmp_path / "cifar-100-python"
    shutil.copytree(sample / folder.name, folder)
    for name in ("test", "train"):
        whole = (folder / name).read_bytes()
        (folder / name).write_bytes(whole[:size])
        with mistake(f"{name} is damaged .*: delete"):
            cifar100()


def test_download_from_a_server(sample, tmp_path, monkeypatch):
    from torchvision.datasets import CIFAR100

    module = load("cifar100_demo", "download_data")
    served = tmp_path / "served"
    served.mkdir()
    archive = served / CIFAR100.filename
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(sample / "cifar-100-python", "cifar-100-python")
    folder = sample / "cifar-100-python"
    md5 = {p.name: hashlib.md5(p.read_bytes()).hexdigest() for p in folder.iterdir()}
    monkeypatch.setattr(
        CIFAR100, "tgz_md5", hashlib.md5(archive.read_bytes()).hexdigest()
    )
    monkeypatch.setattr(CIFAR100, "train_list", [["train", md5["train"]]])
    monkeypatch.setattr(CIFAR100, "test_list", [["test", md5["test"]]])
    monkeypatch.setattr(CIFAR100, "meta", {**CIFAR100.meta, "md5": md5["meta"]})
    monkeypatch.setattr(CIFAR100, "url", "")
    monkeypatch.setenv("DATADIR", str(tmp_path / "data"))
    with serving(served) as url:
        with mistake("login node"):
            call(module, "--url", f"{url}/gone.tar.gz")
        assert not (tmp_path / "data/cifar-100-python").exists()
        call(module, "--url", f"{url}/{archive.name}")
    (saved,) = (tmp_path / "data").iterdir()
    assert saved.name == "cifar-100-python"
    assert len(cifar100()[0]) == 500
    # A copy that somebody has, from where it lies or from the folder above it.
    for source in (saved, saved.parent):
        monkeypatch.setenv("DATADIR", str(tmp_path / f"of-{source.name}"))
        call(module, "--from", source)
        assert len(cifar100()[1]) == 100
    (saved / "test").write_bytes(b"half")
    monkeypatch.setenv("DATADIR", str(tmp_path / "none"))
    with mistake(f"no whole cifar-100-python in {saved}"):
        call(module, "--from", saved)
    assert not (tmp_path / "none/cifar-100-python").exists()
