"""RunLog: printed lines, TensorBoard scalars and results.jsonl."""

import argparse
import json
import os
import resource
import sys
from pathlib import Path

import pytest
import torch
from conftest import raises_user_error

from common.log import RunLog, rank0_print

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
    log = RunLog(ARGS, CPU, gpus=2)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters())
    for epoch, seconds in enumerate([50, 2, 7, 3, 1000], start=1):
        model(torch.ones(3)).sum().backward()
        optimizer.step()
        # The last epoch is of fine-tuning, on other images.
        images = 100 if epoch <= ARGS.epochs else 30
        train = {"loss": 1 / epoch, "accuracy": 50.0}
        log.epoch(epoch, images, seconds, train=train)
    log.write_result(accuracy=75.0)
    (result,) = read_results()
    expected = {
        "script": "script",
        "folder": "where",
        "profiled": False,
        "gpus": 2,
        "nodes": 1,
        "device": "CPU core",
        "cpus": os.cpu_count(),
        "torch": torch.__version__,
        "slurm_job": "77",
        "options": vars(ARGS),
        "batch": 10,
        "batch_per_gpu": 5,
        "unit": "images",
        "images_per_epoch": 100,
        "images_per_second": pytest.approx(100 / 3),
        "seconds_per_epoch": 3,
        "gradient_bytes": 4 * (6 + 2),
        "accuracy": 75,
    }
    assert {key: result[key] for key in expected} == expected
    assert 0.05 < result["peak_memory_gb"] < 100 and result["cpu"].strip()
    ends = result["epoch_ends"]
    assert len(ends) == 5 and ends == sorted(ends) and result["finished"]
    assert capsys.readouterr().out.splitlines() == [
        "script on 2 x CPU core",
        "Batch size: 5 per CPU core x 2 CPU cores = 10",
        "Epoch 1: 50.0 s, 2.0 images/s; train loss 1 accuracy 50 %",
        "Epoch 2: 2.0 s, 50.0 images/s; train loss 0.5 accuracy 50 %",
        "Epoch 3: 7.0 s, 14.3 images/s; train loss 0.3333 accuracy 50 %",
        "Epoch 4: 3.0 s, 33.3 images/s; train loss 0.25 accuracy 50 %",
        "Epoch 5: 1000.0 s, 0.0 images/s; train loss 0.2 accuracy 50 %",
        "First epoch: 50.0 s; later ones: 3.0 s",
        "Result added to logs/results.jsonl",
    ]
    (run,) = folder.glob("logs/script-77-*-batch5x2-*")
    events = event_accumulator.EventAccumulator(str(run)).Reload()
    assert [e.value for e in events.Scalars("train/loss")][:2] == [1, 0.5]
    assert [e.step for e in events.Scalars("images_per_second")] == [1, 2, 3, 4, 5]


def test_only_rank_0_reports(folder, monkeypatch, capsys):
    """Without Slurm all nodes are on one machine, and share its cores."""
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    monkeypatch.setenv("WORLD_SIZE", "16")
    monkeypatch.setenv("GROUP_WORLD_SIZE", "2")
    for rank in ("3", "0"):
        monkeypatch.setenv("RANK", rank)
        log = RunLog(ARGS, CPU, scalars=False, unit="tokens")
        assert log.batch == 80
        loader = [(torch.zeros(5, 3), torch.zeros(5))] * 9
        assert len([*log.progress(loader)]) == 9
        assert len([*log.progress(loader, 2)]) == 2
        log.print("a line")
        rank0_print("another")
        log.epoch(1, 100, 4)
        log.write_result()
        if rank != "0":
            assert capsys.readouterr() == ("", "") and not [*folder.iterdir()]
    (result,) = read_results()
    assert (result["device"], result["nodes"]) == ("CPU core (16 share 2)", 2)
    assert (result["tokens_per_epoch"], result["tokens_per_second"]) == (100, 25)
    lines = capsys.readouterr().out.splitlines()
    assert lines[1:4] == [
        "Batch size: 5 per rank x 16 ranks = 80",
        "a line",
        "another",
    ]


def test_a_full_disk_leaves_no_partial_line(folder):
    log = RunLog(ARGS, CPU, scalars=False)
    log.epoch(1, 100, 1)
    results = folder / "logs/results.jsonl"
    results.write_text("whole\n")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        with raises_user_error("no room for the result"):
            log.write_result()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert results.read_text() == "whole\n"
    log.write_result()
    assert len(results.read_text().splitlines()) == 2


def test_an_unwritable_logs_folder_is_an_error(folder):
    (folder / "logs").write_text("a file")
    with raises_user_error("cannot write logs/"):
        RunLog(ARGS, CPU)


@pytest.mark.parametrize("kind", ["folder", "FIFO", "dangling link"])
def test_unwritable_results_are_an_error_before_training(kind, folder):
    results = folder / "logs/results.jsonl"
    results.parent.mkdir()
    if kind == "folder":
        results.mkdir()
    elif kind == "FIFO":
        os.mkfifo(results)
    else:
        results.symlink_to("/nowhere/results.jsonl")
    with raises_user_error("cannot write logs/results.jsonl: move it away"):
        RunLog(ARGS, CPU)


def test_a_last_line_without_a_newline_is_kept(folder):
    (folder / "logs").mkdir()
    (folder / "logs/results.jsonl").write_text("of an editor")
    log = RunLog(ARGS, CPU, scalars=False)
    log.epoch(1, 100, 1)
    log.write_result()
    first, second = (folder / "logs/results.jsonl").read_text().splitlines()
    assert first == "of an editor" and json.loads(second)["gpus"] == 1
