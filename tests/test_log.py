"""RunLog: printed lines, TensorBoard scalars and results.jsonl."""

import argparse
import json
import sys
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


def test_a_run_writes_its_result_and_scalars(folder, monkeypatch, capsys):
    from tensorboard.backend.event_processing import event_accumulator

    monkeypatch.setenv("SLURM_JOB_ID", "77")
    model = torch.nn.Linear(3, 4)
    model.bias.requires_grad_(False)
    log = RunLog(ARGS, CPU, model, gpus=2)
    # The first epoch fills caches; the last one is of fine-tuning, on other images.
    for epoch, seconds in enumerate([50, 2, 7, 3, 1000], start=1):
        images = 100 if epoch <= ARGS.epochs else 30
        train = {"loss": 1 / epoch, "accuracy": 50.0}
        log.epoch(epoch, images, seconds, train=train)
    log.write_result(accuracy=75.0)
    (result,) = read_results()
    expected = {
        "script": "/some/where/script.py",
        "device": "CPU core",
        "slurm_job": "77",
        "options": vars(ARGS),
        "unit": "images",
        "per_epoch": 100,
        "seconds_per_epoch": 3,  # the median of 2, 7 and 3; their mean is 4
        "accuracy": 75,
        "gradient_bytes": 48,  # of the weights; the bias is frozen
        "gpus_shared": None,
        "checkup": False,
    }
    assert {key: result[key] for key in expected} == expected
    assert 0.05 < result["peak_memory_gb"] < 100 and result["cpu"].strip()
    ends = result["epoch_ends"]
    assert len(ends) == 5 and ends == sorted(ends) and result["finished"]
    first, second, third, *_, last, end = capsys.readouterr().out.splitlines()
    assert [first, second, third, last, end] == [
        "script on 2 x CPU core",
        "Batch size: 5 per CPU core x 2 CPU cores = 10",
        "Epoch 1: 50.0 s, 2.0 images/s; train loss 1 accuracy 50 %",
        "Epoch 5: 1000.0 s, 0.0 images/s; train loss 0.2 accuracy 50 %",
        "Result added to logs/results.jsonl",
    ]
    (run,) = folder.glob("logs/2gpus-script-77-*")
    events = event_accumulator.EventAccumulator(str(run)).Reload()
    assert [e.value for e in events.Scalars("train/loss")][:2] == [1, 0.5]
    assert [e.step for e in events.Scalars("images_per_second")] == [1, 2, 3, 4, 5]


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
        log.add_scalar("own", 1, 1)
        log.write_result(accuracy=0)
        if rank != 0:
            assert capsys.readouterr() == ("", "") and not [*folder.iterdir()]
    (result,) = read_results()
    assert (result["gpus"], result["nodes"]) == (16, 2)
    assert (result["unit"], result["per_epoch"]) == ("tokens", 100)
    assert result["slurm_job"] is None and result["seconds_per_epoch"] == 4
    assert result["checkup"] is True  # a watched run is no measurement
    assert capsys.readouterr().out.splitlines()[2] == "a line"
    assert len([*folder.glob("logs/16gpus-script-*/events*")]) == 1


def test_a_script_with_its_own_scalars_has_one_file_of_events(folder):
    log = RunLog(ARGS, CPU)
    log.epoch(1, 100, 4)
    log.write_result(accuracy=0)
    assert not log.folder.exists()


def test_ranks_that_share_a_gpu_are_said(fake_gpus, monkeypatch, capsys):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    fake_gpus(2, get_device_name=lambda _: "H200", max_memory_allocated=lambda _: 1)
    log = RunLog(ARGS, torch.device("cuda", 0), gpus=4)
    lines = "script: 4 ranks share 2 x H200\nRanks that share a GPU take turns"
    assert capsys.readouterr().out.startswith(lines)
    log.epoch(1, 100, 4)
    log.write_result(accuracy=0)
    assert read_results()[0]["gpus_shared"] == 2
