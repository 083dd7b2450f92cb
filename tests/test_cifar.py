"""cifar100_demo/: the three scripts, profile, monitor, plots, data, user errors."""

import json
import os
import re

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
    # The monitor samples all of the job, and ends with it.
    plot_utilisation = load("cifar100_demo", "plot_utilisation")
    (file,) = exercise.glob("logs/utilisation-*.csv")
    (devices,) = plot_utilisation.read_samples(file).values()
    times, used = zip(*devices["CPU"], strict=True)
    assert times[-1] - times[0] > result["training_seconds"] / 2
    assert 100 >= max(used) > 50 / len(os.sched_getaffinity(0))  # one core of them
    assert not processes_in(exercise)
    monkeypatch.chdir(exercise)
    monkeypatch.setenv("DATADIR", str(sample))
    for script in ("plot_utilisation", "plot_trace", "plot_data"):
        call(load("cifar100_demo", script))
    assert {"trace.png", "data.png"} <= {*os.listdir("logs")}


def test_ddp_writes_a_trace_for_every_rank_and_prints_all_reduces(exercise, sample):
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


def test_plot_of_the_last_step_in_a_gpus_trace(tmp_path):
    """The GPU lags behind. Threads have a process, streams a GPU."""
    plot_trace = load("cifar100_demo", "plot_trace")
    file = tmp_path / "trace.json"
    with raises_user_error(f"no {file}; run `bash run_single_cifar.sh` or"):
        call(plot_trace, file)
    columns = "name", "ts", "dur", "cat", "pid", "tid"  # times in microseconds
    rows = [
        ("ProfilerStep#6", 80_000, 20_000, "user_annotation", 7, 7),
        ("ProfilerStep#7", 100_000, 20_000, "user_annotation", 7, 7),
        ("ProfilerStep#7", 102_000, 38_000, "gpu_user_annotation", 0, 7),
        ("autograd::engine::evaluate_function: X", 104_000, 8000, "cpu_op", 7, 9),
        ("Optimizer.step#SGD.step", 114_000, 4000, "user_annotation", 7, 7),
        ("cudnn::implicit_gemm", 103_000, 7000, "kernel", 0, 7),
        ("multi_tensor_apply<FusedSgd>", 133_000, 4000, "kernel", 0, 7),
        ("ncclDevKernel_AllReduce_Sum", 124_000, 9000, "kernel", 0, 20),
    ]
    events = [dict(zip(columns, row, strict=True)) for row in rows]
    file.write_text(json.dumps({"traceEvents": events}))
    bands = plot_trace.read_step(file)
    names = {plot_trace.name_band(band, bands[band]): band for band in bands}
    streams = "GPU 0, stream 7", "GPU 0, stream 20"  # 7 is also the main thread's
    assert set(names) == {"main thread", "backward thread", *streams}
    assert len(bands) == 4
    ((_, *times),) = bands[names["backward thread"]]
    assert times == [4, 8]  # start and duration in ms
    kinds = [plot_trace.find_kind(n) for s in streams for n, *_ in bands[names[s]]]
    assert kinds == ["convolution", "optimizer", "communication"]
    phases = plot_trace.find_phases(bands)
    assert phases == {"forward": 0, "backward": 4, "optimizer": 14}
    call(plot_trace, file, "--to", tmp_path / "trace.png")
    assert (tmp_path / "trace.png").stat().st_size > 10_000


def test_plots_skip_incomplete_lines_and_other_jobs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "logs").mkdir()
    file = tmp_path / "logs/utilisation-7.csv"
    text = "time, index, utilization.gpu [%]\n10.5, 0, 50 %\n12.5, 0, 70 %\n13"
    file.write_text(text)
    mine = {"script": "mine", "epoch_ends": [11, 12], "slurm_job": "7"}
    lines = [json.dumps(line) for line in (mine, mine | {"slurm_job": "8"})]
    (tmp_path / "logs/results.jsonl").write_text("\n".join(lines))
    plot_utilisation = load("cifar100_demo", "plot_utilisation")
    samples = plot_utilisation.read_samples(file)
    assert samples == {"utilisation in %": {"GPU 0": [(10.5, 50), (12.5, 70)]}}
    assert plot_utilisation.read_runs("7", 10.5, 14.5) == [("mine", [11, 12])]


def test_the_monitor_asks_for_the_gpus_of_its_job(monkeypatch):
    """AMD's tools number the GPUs of a node as Slurm does."""
    monitor = load("cifar100_demo", "monitor_gpus")
    installed = "nvidia-smi"
    monkeypatch.setattr(monitor, "query", lambda command: command[0] == installed)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setenv("SLURM_JOB_GPUS", "4,5")
    assert monitor.find_command() == [*monitor.NVIDIA, "--id=0,1"]
    installed = "amd-smi"
    assert monitor.find_command() == [*monitor.AMD, "--gpu", "4", "5"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    assert monitor.find_command() is None  # hidden: it samples the CPU cores
