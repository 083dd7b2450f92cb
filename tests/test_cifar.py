"""cifar100_demo/: the three scripts, profile, monitor, plots, data, user errors."""

import json
import os
import re
import struct
import sys
from itertools import pairwise
from statistics import median

import pytest
import torch
from conftest import REPOSITORY, call, copy_exercise, load, raises_user_error, run
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from test_faults import processes_in
from torchvision import models, transforms

FOLDER = REPOSITORY / "cifar100_demo"
QUICK = ("--arch", "resnet18", "--image-size", "40", "--batch-size", "16")


@pytest.fixture
def exercise(tmp_path):
    return copy_exercise("cifar100_demo", tmp_path)


def scalars(exercise):
    """Return {tag: values} of the one run in logs/."""
    (file,) = exercise.rglob("*tfevents*")
    events = EventAccumulator(str(file)).Reload()
    tags = events.Tags()["scalars"]
    return {tag: [event.value for event in events.Scalars(tag)] for tag in tags}


def check_run(done, exercise, processes, steps):
    """Check the output and files of a run of two epochs; return its result."""
    assert done.returncode == 0 and done.stderr == "", done.stderr
    for line in (
        f"Epoch 1 [{steps}/{steps}]: loss N, N ms per iteration, N images/s, N GB",
        "Epoch 2: N s, N images/s; step ms N GB N; train loss N accuracy N %; "
        "validation loss N accuracy N %",
    ):
        line = re.escape(line).replace("N", r"[\d.]+")
        assert re.search(f"^{line}$", done.stdout, re.M), line
    (result,) = map(json.loads, (exercise / "logs/results.jsonl").open())
    assert result["gpus"] == processes
    assert result["per_epoch"] == 16 * steps * processes
    return result


def test_one_gpu_with_its_profile_monitor_and_plots(exercise, sample, monkeypatch):
    command = ["bash", "run_single_cifar.sh", *QUICK, "--epochs", "2"]
    done = run([*command, "--steps", "20"], exercise, sample)
    result = check_run(done, exercise, 1, 20)
    # The loss falls on synthetic images, and TensorBoard has it.
    first, second = scalars(exercise)["train/loss"]
    assert first > second + 0.1
    assert len(scalars(exercise)["iterations/loss"]) == 20  # ten in an epoch
    # Profile: three steps; the costliest operator is first in the table.
    trace = json.loads((exercise / "logs/profiler/train_cifar100.json").read_text())
    names = {event["name"] for event in trace["traceEvents"]}
    steps = {name for name in names if name.startswith("ProfilerStep")}
    assert steps == {"ProfilerStep#5", "ProfilerStep#6", "ProfilerStep#7"}
    table = done.stdout[done.stdout.index("Self CPU %") :].splitlines()
    assert "aten::convolution_backward" in table[2]
    assert "All-reduces" not in done.stdout
    # Monitor: a sample per second; it ends with the job.
    plot_utilisation = load("cifar100_demo", "plot_utilisation")
    (file,) = exercise.glob("logs/utilisation-*.csv")
    (devices,) = plot_utilisation.read_samples(file).values()
    times, used = zip(*devices["CPU"], strict=True)
    assert times[-1] - times[0] > result["training_seconds"] / 2
    assert 0.9 < median(b - a for a, b in pairwise(times)) < 2
    assert 100 >= max(used) > 50 / len(os.sched_getaffinity(0))  # one core of them
    assert not processes_in(exercise)
    monkeypatch.chdir(exercise)
    monkeypatch.setenv("DATADIR", str(sample))
    for script in ("plot_utilisation", "plot_trace", "plot_data"):
        call(load("cifar100_demo", script))
    assert {"trace.png", "data.png"} <= {*os.listdir("logs")}


def test_ddp_writes_a_trace_for_each_rank_and_prints_all_reduces(exercise, sample):
    command = ["bash", "run_ddp_cifar100.sh", *QUICK, "--epochs", "2", "--amp"]
    done = run([*command, "--steps", "9"], exercise, sample)
    check_run(done, exercise, 2, 9)
    traces = sorted(path.name for path in (exercise / "logs/profiler").iterdir())
    names = [f"train_ddp_cifar100_rank{rank}.json" for rank in (0, 1)]
    assert traces == names
    assert done.stdout.count("Self CPU time total") == 1
    (reduces,) = done.stdout.split("\nAll-reduces ")[1:]
    table = reduces.splitlines()[:4]
    assert re.fullmatch(r" +Number +CPU ms", table[0])
    # Three steps, each with three buckets and one log line.
    assert re.fullmatch(r"c10d::allreduce_ +12 +[\d.]+", table[1])
    assert re.fullmatch(r"gloo:all_reduce +12 +[\d.]+", table[2])
    assert table[3] == f"Trace saved to logs/profiler/{names[0]}"
    assert len(scalars(exercise)["train/loss"]) == 2


def test_a_report_comes_every_tenth_of_an_epoch_or_sooner():
    report_interval = load("cifar100_demo", "training_report").report_interval
    assert [report_interval(steps) for steps in (1, 25, 2005)] == [1, 3, 100]


def test_data_parallel_without_a_profile(exercise, sample):
    command = ["bash", "run_data_parallel_cifar100.sh", *QUICK, "--epochs", "2"]
    done = run([*command, "--steps", "2", "--no-profile"], exercise, sample)
    check_run(done, exercise, 1, 2)
    assert not (exercise / "logs/profiler").exists()


def test_images_are_resized_on_the_device_as_torchvision_does(sample, monkeypatch):
    module = load("cifar100_demo", "train_cifar100")
    monkeypatch.setenv("DATADIR", str(sample))
    images, _ = module.cifar100()[0].__getitems__(range(8))
    model = module.Classifier("resnet18", 224, None)
    model.resnet = torch.nn.Identity()
    steps = [transforms.ToPILImage(), transforms.Resize(224), transforms.ToTensor()]
    steps += [transforms.Normalize(module.MEAN, module.STD)]
    expected = torch.stack([transforms.Compose(steps)(image) for image in images])
    deviation = torch.tensor(module.STD)[:, None, None]
    difference = ((model(images) - expected) * deviation * 255).abs()
    assert difference.mean() < 2 and difference.max() < 2


def test_parameters_and_flops_match_torchvision():
    get_parameters = load("cifar100_demo", "get_parameters")
    for arch in ("resnet18", "resnet152"):
        meta = models.get_model_weights(arch)["IMAGENET1K_V1"].meta
        counts = get_parameters.count_costs(arch, 2, 224, classes=1000)
        assert counts["parameters"] == meta["num_params"]
        # torchvision counts multiply-accumulates, in billions.
        assert counts["forward"] / 2e9 == pytest.approx(meta["_ops"], rel=1e-3)
        assert 2.9 < counts["training"] / counts["forward"] < 3


def test_the_answers_quote_get_parameters(capsys):
    call(load("cifar100_demo", "get_parameters"))
    shown, answers = capsys.readouterr().out, (FOLDER / "ANSWERS.md").read_text()
    for figure in ("3.44 PFLOP", "23.4"):
        assert figure in shown and figure in answers


def gpu_trace():
    """Return a trace as torch.profiler writes it on a GPU that lags behind."""
    cpu, backward, gpu = (7, 7), (7, 9), (0, 7)  # (process, thread), (GPU, stream)
    annotation = "user_annotation"
    rows = [  # name, start and duration in ms, location, category
        ("ProfilerStep#6", -20, 20, cpu, annotation),
        ("ProfilerStep#7", 0, 20, cpu, annotation),
        ("ProfilerStep#7", 2, 38, gpu, "gpu_user_annotation"),
        ("Activity Buffer Request", 1, 1, (-1, 0), "overhead"),
        ("aten::cudnn_convolution", 0, 2, cpu, "cpu_op"),
        ("autograd::engine::evaluate_function: X", 4, 8, backward, "cpu_op"),
        ("nccl:all_reduce", 6, 0.5, backward, annotation),
        ("Optimizer.step#SGD.step", 14, 4, cpu, annotation),
        ("late kernel of step 6", 0, 2, gpu, "kernel"),
        ("cudnn::implicit_gemm", 3, 7, gpu, "kernel"),
        ("sm90_dgrad_fprop", 10, 18, gpu, "kernel"),
        ("ncclDevKernel_AllReduce_Sum", 24, 9, (0, 20), "kernel"),
        ("multi_tensor_apply<FusedSgd>", 33, 4, gpu, "kernel"),
    ]
    events = [{"ph": "M", "name": "thread_name", "pid": 0, "tid": 7, "ts": 0}]
    for name, start, duration, (pid, tid), category in rows:
        times = {"ts": 1e6 + 1e3 * start, "dur": 1e3 * duration}
        event = {"name": name, "cat": category, "pid": pid, "tid": tid}
        events.append(event | times)
    return {"traceEvents": events}


def test_plot_of_a_gpus_trace(tmp_path):
    plot_trace = load("cifar100_demo", "plot_trace")
    file = tmp_path / "trace.json"
    with raises_user_error(f"no {file}; run `bash run_single_cifar.sh` or"):
        call(plot_trace, file)
    file.write_text(json.dumps(gpu_trace()))
    bands = plot_trace.read_step(file)
    names = {plot_trace.name_band(band, bands[band]): band for band in bands}
    streams = "GPU 0, stream 7", "GPU 0, stream 20"  # 7 is also the main thread's
    assert set(names) == {"main thread", "backward thread", *streams}
    # In ms from the start of the last step; other steps are left out.
    assert bands[names["backward thread"]] == [
        ("autograd::engine::evaluate_function: X", 4, 8),
        ("nccl:all_reduce", 6, 0.5),
    ]
    kinds = [plot_trace.find_kind(n) for n, *_ in bands[names["GPU 0, stream 7"]]]
    assert kinds == ["other", "convolution", "convolution", "optimizer"]
    ((reduce, *_),) = bands[names["GPU 0, stream 20"]]
    assert plot_trace.find_kind(reduce) == "communication"
    phases = plot_trace.find_phases(bands)
    assert phases == {"forward": 0, "backward": 4, "optimizer": 14}
    plot_trace.plot(bands, tmp_path / "trace.png")
    many = {(True, 0, i): [("kernel", 0, i)] for i in range(3000)}
    bands = plot_trace.pick_busiest(many)
    assert {*bands} == {(True, 0, i) for i in range(2980, 3000)}
    plot_trace.plot(many, tmp_path / "many.png")
    height = struct.unpack(">I", (tmp_path / "many.png").read_bytes()[20:24])
    assert height[0] < 3000


def test_plots_skip_incomplete_lines(tmp_path, monkeypatch):
    """As of a job that was cancelled, and of another job."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "logs").mkdir()
    file = tmp_path / "logs/utilisation-7.csv"
    text = "time, index, utilization.gpu [%]\n10.5, 0, 50 %\n12.5, 0, 70 %\n13"
    file.write_text(text)
    run = {"script": "mine", "epoch_ends": [11, 12], "slurm_job": "7"}
    lines = [json.dumps(line) for line in (run, run | {"slurm_job": "8"})]
    (tmp_path / "logs/results.jsonl").write_text("\n".join(lines))
    plot_utilisation = load("cifar100_demo", "plot_utilisation")
    samples = plot_utilisation.read_samples(file)
    assert samples == {"utilisation in %": {"GPU 0": [(10.5, 50), (12.5, 70)]}}
    assert plot_utilisation.read_runs("7", 10.5, 14.5) == [("mine", [11, 12])]
    call(plot_utilisation)
    assert (tmp_path / "logs/utilisation.png").stat().st_size > 10_000


TOOLS = {  # what each tool prints, and what is plotted
    "nvidia-smi": (
        "index, utilization.gpu [%], memory.used [MiB], power.draw [W]\n"
        "0, 97 %, 40000 MiB, 301.52 W\n1, 5 %, 4 MiB, [N/A]\n",
        [(97, 41.943, 301.52), (5, 0.004)],
    ),
    "amd-smi": (  # columns as in its source; of two, the values are lists
        "gpu,gfx_activity,umc_activity,vcn_activity,socket_power,power_management,"
        "total_vram,used_vram,free_vram,used_visible_vram\n"
        "0,97,5,\"['N/A', 'N/A']\",352,ENABLED,65520,8184,57336,8184\n\n",
        [(97, 8.582, 352)],
    ),
    "rocm-smi": (
        "WARNING: AMD GPU device(s) is/are in a low-power state\n\n"
        "device,Current Socket Graphics Package Power (W),GPU use (%),"
        "VRAM Total Memory (B),VRAM Total Used Memory (B)\n"
        "card0,100.0,97,17163091968,8581545984\n",
        [(97, 8.582, 100)],
    ),
}


@pytest.mark.parametrize("tool", TOOLS)
def test_monitor_queries_the_installed_tool(tool, tmp_path):
    answer, gpus = TOOLS[tool]
    file, asked = tmp_path / tool, tmp_path / "asked"
    refuse = "case $* in *all*|*9*) echo No devices were found; exit 6; esac"
    script = f"#!/bin/sh\necho \"$@\" > '{asked}'\n{refuse}\ncat <<'E'\n{answer}E\n"
    file.write_text(script)
    file.chmod(0o755)
    code = (
        "import monitor_gpus, os, sys\n"
        "sys.argv = ['', 'out.csv', str(os.getpid())]\n"
        "alive = iter([True])\n"
        "monitor_gpus.is_running = lambda pid: next(alive, False)\n"
        "monitor_gpus.main()"
    )
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": str(FOLDER)}
    command = [sys.executable, "-c", code]
    read_samples = load("cifar100_demo", "plot_utilisation").read_samples
    option = {"amd-smi": "--gpu ", "rocm-smi": "--device "}.get(tool)
    ids = f"{option}2 3" if option else "--id=2,3"
    for visible, words in (("2,3", ids), ("9", "")):  # 9: not on this node
        done = run(command, tmp_path, **env, CUDA_VISIBLE_DEVICES=visible)
        assert done.returncode == 0, done.stderr
        assert words in asked.read_text() and "9" not in asked.read_text()
        plotted, samples = {}, read_samples(tmp_path / "out.csv")
        assert [*samples] == ["utilisation in %", "memory in GB", "power in W"]
        for devices in samples.values():
            for device, ((_, number),) in devices.items():
                plotted.setdefault(device, []).append(round(number, 3))
        assert plotted == {f"GPU {i}": list(gpu) for i, gpu in enumerate(gpus)}
    if option:  # AMD's tools number GPUs as Slurm does
        slurm = {"SLURM_JOB_GPUS": "4,5", "CUDA_VISIBLE_DEVICES": "0,1"}
        run(command, tmp_path, **env, **slurm)
        assert f"{option}4 5" in asked.read_text()
    asked.unlink()
    run(command, tmp_path, **env, CUDA_VISIBLE_DEVICES="-1")
    assert not asked.exists()  # the GPUs are hidden: it samples the CPU cores
