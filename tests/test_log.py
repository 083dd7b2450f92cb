"""RunLog: printed lines and results.jsonl."""

import argparse
import json
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from common.log import RunLog

CPU = torch.device("cpu")
ARGS = argparse.Namespace(batch_size=5, epochs=4, lr=0.1)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Return an empty folder, in which the test runs as script.py."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["/some/where/script.py"])
    return tmp_path


def read_results():
    lines = Path("logs/results.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_a_run_writes_its_result(monkeypatch, capsys):
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    model = torch.nn.Linear(3, 4)
    model.bias.requires_grad_(False)
    begin, log = time.time(), RunLog(ARGS, CPU, model, gpus=2)
    # The first epoch fills caches; the last one is of fine-tuning, on other images.
    for epoch, seconds in enumerate([50, 2, 7, 3, 1000], start=1):
        images = 100 if epoch <= ARGS.epochs else 30
        train = {"loss": 1 / epoch, "accuracy": 50.0}
        log.epoch(epoch, images, seconds, train=train)
    log.write_result(accuracy=75.0, profiled=True)
    (result,) = read_results()
    expected = {
        "script": "/some/where/script.py",
        "device": "CPU core",
        "slurm_job": "77",
        "options": vars(ARGS),
        "unit": "images",
        "per_epoch": 100,
        "epoch_seconds": [50, 2, 7, 3, 1000],
        "accuracy": 75,
        "gradient_bytes": 48,  # of the weights; the bias is frozen
        "gpus_shared": None,
        "checkup": False,
        "profiled": True,  # a field of the script's own
    }
    assert {key: result[key] for key in expected} == expected
    assert 0.05 < result["peak_memory_gb"] < 100 and result["cpu"].strip()
    ends = result["epoch_ends"]
    assert len(ends) == 5 and begin < ends[0] and ends == sorted(ends)
    first, second, third, *_, last, end = capsys.readouterr().out.splitlines()
    assert [first, second, third, last, end] == [
        "script on 2 x CPU core",
        "Batch size: 5 per CPU core x 2 CPU cores = 10",
        "Epoch 1: 50.0 s, 2.0 images/s; train loss 1 accuracy 50 %",
        "Epoch 5: 1000.0 s, 0.0 images/s; train loss 0.2 accuracy 50 %",
        "Result added to logs/results.jsonl",
    ]


def test_only_rank_0_reports(folder, monkeypatch, capsys):
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 16)
    monkeypatch.setenv("GROUP_WORLD_SIZE", "2")
    monkeypatch.setenv("DDP_CHECKUP", "1")
    for rank in 3, 0:
        log = RunLog(ARGS, CPU, enabled=rank == 0)
        assert log.global_batch == 80
        loader = [(torch.zeros(5, 3), torch.zeros(5))] * 9
        assert len([*log.progress(loader, "training")]) == 9
        log.print("a line")
        log.epoch(1, 100, 4, "tokens", train={"loss": 1.0})
        log.write_result(accuracy=0)
        if rank != 0:
            assert capsys.readouterr() == ("", "") and not [*folder.iterdir()]
    (result,) = read_results()
    assert (result["gpus"], result["nodes"]) == (16, 2)
    assert (result["unit"], result["per_epoch"]) == ("tokens", 100)
    assert result["slurm_job"] is None and result["epoch_seconds"] == [4]
    assert result["checkup"] is True  # a watched run is no measurement
    assert capsys.readouterr().out.splitlines()[2] == "a line"


def test_a_torn_line_takes_no_other_with_it(folder):
    (folder / "logs").mkdir()
    (folder / "logs/results.jsonl").write_text('{"script": "on a full di')
    log = RunLog(ARGS, CPU)
    log.epoch(1, 100, 4)
    log.write_result(accuracy=0)
    torn, whole = Path("logs/results.jsonl").read_text().splitlines()
    assert json.loads(whole)["epoch_seconds"] == [4]


def test_ranks_that_share_a_gpu_are_said(fake_gpus, monkeypatch, capsys):
    """Of any kind: its name and its memory come from PyTorch's module for it."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    name, peak = lambda _: "Data Center GPU Max 1550", lambda _: 2e9
    fake_gpus(2, "xpu", get_device_name=name, max_memory_allocated=peak)
    log = RunLog(ARGS, torch.device("xpu", 0), gpus=4)
    first, second = capsys.readouterr().out.splitlines()[:2]
    assert first == "script on 4 x Data Center GPU Max 1550"
    assert second == "Its ranks share 2 GPU: compare no times"
    log.epoch(1, 100, 4)
    log.write_result(accuracy=0)
    (result,) = read_results()
    assert result["device"] == "Data Center GPU Max 1550"
    assert (result["gpus_shared"], result["peak_memory_gb"]) == (2, 2)
