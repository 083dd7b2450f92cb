"""What a run leaves behind, and what compare.py makes of it."""

import argparse
import json
import sys

import pytest
import torch
from conftest import REPOSITORY, run

from common.cli import UserError
from common.compare import compare, read_runs
from common.log import RunLog

CPU = torch.device("cpu")


def args(**options):
    return argparse.Namespace(**{"batch_size": 5, "epochs": 3, "lr": 0.1, **options})


def test_result_and_scalars_of_a_run(tmp_path, monkeypatch, capsys):
    from tensorboard.backend.event_processing.event_accumulator import (
        EventAccumulator,
    )

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["/some/where/script.py"])
    log = RunLog(args(), CPU, world_size=2)
    for epoch, seconds in enumerate(
        [50, 2, 4, 1000], start=1
    ):  # the 4th is fine-tuning
        log.epoch(epoch, 100, seconds, train={"loss": 1 / epoch, "accuracy": 50.0})
    log.finish(accuracy=75.0)
    (result,) = read_runs(["logs/results.jsonl"])
    assert result["script"] == "script" and result["gpus"] == 2
    assert result["batch_per_gpu"] == 5 and result["batch"] == 10
    assert result["seconds_per_epoch"] == 3 and result["images_per_epoch"] == 100
    assert result["images_per_second"] == pytest.approx(100 / 3)
    assert result["accuracy"] == 75 and result["device"] == "CPU core"
    assert 0.05 < result["peak_memory_gb"] < 100
    assert "Epoch 2: 2.0 s, 50.0 images/s; train loss 0.5 accuracy 50 %" in (
        capsys.readouterr().out
    )
    events = EventAccumulator(str(next(tmp_path.glob("logs/script-*")))).Reload()
    assert [e.value for e in events.Scalars("train/loss")][:2] == [1, 0.5]
    assert [e.step for e in events.Scalars("images_per_second")] == [1, 2, 3, 4]


def test_a_disabled_log_does_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    log = RunLog(args(), CPU, world_size=2, enabled=False)
    log.print("x")
    log.epoch(1, 100, 1.0, train={"loss": 1.0})
    log.finish(accuracy=1.0)
    assert capsys.readouterr().out == "" and list(tmp_path.iterdir()) == []


def result(script, gpus, speed, batch=25, **fields):
    options = {"epochs": 10, "batch_size": batch, "backbone": "tinyvgg"}
    return {
        "script": script,
        "gpus": gpus,
        "device": "H200",
        "batch_per_gpu": batch,
        "batch": batch * gpus,
        "options": options,
        "images_per_epoch": 2000,
        "seconds_per_epoch": 2000 / speed,
        "images_per_second": speed,
        "training_seconds": 10,
        "accuracy": 90.0,
        "peak_memory_gb": 1.0,
        **fields,
    }


NAME = "pytorch_dvc_cnn_pretrained"


def test_twins_are_compared_with_the_smallest_run():
    runs = [
        result(f"{NAME}_multigpu", 8, 700),
        result(f"{NAME}_multigpu", 2, 180),
        result(NAME, 1, 90),
        result(NAME, 1, 100),
        result("strong_scaling", 2, 150, batch=12),
        result(f"{NAME}_largedata", 1, 50, images_per_epoch=22000),
        result(f"{NAME}_largedata_multigpu", 4, 100, images_per_epoch=22000),
        result(NAME, 1, 3, device="CPU core"),
    ]
    groups = compare(runs)
    assert sorted(map(len, groups.values())) == [1, 2, 5]
    small = max(groups.values(), key=len)
    assert [(r["gpus"], r["speedup"], r["efficiency"]) for r in small] == [
        (1, 1.0, 1.0),
        (1, 0.9, 0.9),
        (2, 1.8, 0.9),
        (2, 1.5, 0.75),
        (8, 7.0, 0.875),
    ]
    (large,) = (rows for title, rows in groups.items() if "22000 images" in title)
    assert [row["speedup"] for row in large] == [1, 2]
    (cpu,) = (rows for title, rows in groups.items() if "CPU core" in title)
    assert cpu[0]["speedup"] == 1


def test_the_command_prints_a_table_and_draws(tmp_path):
    lines = [
        json.dumps(result(NAME, 1, 100)),
        json.dumps(result(f"{NAME}_multigpu", 2, 190)),
    ]
    for i, line in enumerate(lines):
        (tmp_path / f"{i}.jsonl").write_text(line + "\n")
    command = [sys.executable, "-m", "common.compare", tmp_path / "0.jsonl"]
    plot = tmp_path / "plot.png"
    done = run([*command, tmp_path / "1.jsonl", "--plot", plot], REPOSITORY)
    assert done.returncode == 0, done.stderr
    header, first, second = done.stdout.splitlines()[2:5]
    assert header.split()[:3] == ["script", "GPUs", "device"]
    assert first.split()[:2] == [NAME, "1"] and "1.00" in first and "100%" in first
    assert second.split()[:2] == [f"{NAME}_multigpu", "2"]
    assert "1.90" in second and "95%" in second and "90.00 %" in second
    assert plot.read_bytes().startswith(b"\x89PNG") and str(plot) in done.stdout


@pytest.mark.parametrize("text", ["not json\n", "", None])
def test_no_results(text, tmp_path):
    file = tmp_path / "results.jsonl"
    if text is not None:
        file.write_text(text)
    with pytest.raises(UserError, match=r"results"):
        read_runs([str(file)])
