"""common/: imports, ranks, devices, forward passes on a fake GPU, whole runs."""

import json
import re
import shutil
import sys
from argparse import ArgumentTypeError
from pathlib import Path

import pytest
import torch
from conftest import QUICK, REPOSITORY, copy_checkout, load, raises_user_error, run
from torch._subclasses import FakeTensor, FakeTensorMode

from common import data
from common.device import get_device, get_ranks, pick_dtype
from common.errors import positive

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
NAME = "pytorch_dvc_cnn_pretrained"
MODULES = sorted(file.stem for file in REPOSITORY.glob("common/[a-z]*.py"))

IMPORTS = f"""
import atexit, importlib, os, sys, warnings
import torch, torch.distributed.run, torchvision, tqdm

def state():
    settings = torch.get_float32_matmul_precision(), torch.backends.cudnn.benchmark
    hooks = sys.excepthook, sys.stdout, torch.load, atexit._ncallbacks()
    return settings, hooks, sys.argv[:], [*warnings.filters], dict(os.environ)

before = state()
for name in {MODULES}:
    importlib.import_module(f"common.{{name}}")
assert before == state()
"""


def test_an_import_changes_nothing():
    done = run([sys.executable, "-c", IMPORTS], REPOSITORY)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr


def test_a_copy_works_elsewhere_by_plain_torchrun(tmp_path):
    shutil.copytree(REPOSITORY / "common", tmp_path / "common")
    for name in ("ddp.py", "dataset.py", "model.py"):
        shutil.copy(REPOSITORY / "dp_ddp_intro" / name, tmp_path)
    launch = [Path(sys.executable).with_name("torchrun"), "--standalone"]
    launch.append("--local-addr=127.0.0.1")  # the machine may not know its name
    small = "--layers=1", "--width=16", "--heads=2", "--length=16", "--sequences=64"
    command = [*launch, "--nproc-per-node=2", "ddp.py", *small]
    done = run(command, tmp_path, TORCH_CPP_LOG_LEVEL="ERROR")
    assert done.returncode == 0 and "ddp on 2 x CPU core" in done.stdout, done.stderr


def test_ranks_are_those_of_torchrun(monkeypatch):
    with raises_user_error("torchrun.*--nproc-per-node=2"):
        get_ranks()
    for name, number in (("RANK", "5"), ("LOCAL_RANK", "1"), ("WORLD_SIZE", "8")):
        monkeypatch.setenv(name, number)
    with raises_user_error("run `torchrun"):  # left over from something else
        get_ranks()
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "29500")
    assert get_ranks() == (5, 1, 8)


def test_every_rank_has_its_gpu_or_shares_one_if_asked_to(fake_gpus, monkeypatch):
    module = fake_gpus(count=2)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert get_device() == CUDA and get_device(1) == torch.device("cuda", 1)
    assert module.chosen == [0, 1]
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    words = "4 processes, but 2 GPU on this node.*--nproc-per-node=2"
    with raises_user_error(f"{words}.*NCCL_MULTI_RANK_GPU_ENABLE=1"):
        get_device(1)
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    assert [get_device(rank).index for rank in range(4)] == [0, 1, 0, 1]
    assert module.chosen == [0, 1, 0, 1, 0, 1]


@pytest.mark.parametrize(
    "device, native, chosen",
    [
        (CPU, {"avx512_bf16": True}, torch.bfloat16),
        (CPU, {"bf16": True}, torch.bfloat16),  # Arm
        (CPU, {"avx512_f": True}, None),
        (CUDA, True, torch.bfloat16),
        (CUDA, False, torch.float16),  # a T4 emulates bfloat16
    ],
)
def test_pick_dtype_fits_the_device(device, native, chosen, fake_gpus, monkeypatch):

    def is_bf16_supported(including_emulation=True):
        return native or including_emulation

    fake_gpus(is_bf16_supported=is_bf16_supported)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: native, raising=False)
    assert pick_dtype(device) == chosen and pick_dtype(device, "fp32") is None


def test_a_number_of_epochs_is_positive():
    assert positive("1") == 1
    with pytest.raises(ArgumentTypeError, match="use 1 or more"):
        positive("0")


def on_gpu(make, *args):
    """Return a module made on the GPU; .to() fails with fake tensors."""
    with CUDA:
        return make(*args)


def batches(*shape, dtype=torch.long):
    """Return a loader of one batch: images (4, *shape) and labels."""
    return [(torch.zeros(4, *shape, dtype=torch.uint8), torch.zeros(4, dtype=dtype))]


def exercise8():
    script = load("exercise8", NAME)
    model = on_gpu(script.Classifier, "tinyvgg", "none")
    loader = batches(3, 150, 150, dtype=torch.float)
    images = script.normalise(loader[0][0].to(CUDA), script.MEAN, script.STD)
    model(script.augment(images))
    script.evaluate(model, loader, CUDA)


def cinic():
    script = load("cinic_lab", "cinic_amp")
    model = on_gpu(script.Classifier, "resnet18", torch.float16)
    loader = batches(3, 32, 32)
    model(script.crop_and_flip(loader[0][0].to(CUDA)))
    script.evaluate(model, loader, CUDA)


def intro():
    script = load("dp_ddp_intro", "single")
    model = on_gpu(script.Transformer, 2, 16, 2, 8)
    tokens = torch.zeros(4, 8, dtype=torch.long).to(CUDA)
    output = model(tokens).flatten(0, 1)
    loss = script.cross_entropy(output, tokens.flatten())
    script.batch_sums(loss, output.argmax(dim=1) == tokens.flatten())


@pytest.mark.parametrize("forward_pass", [exercise8, cinic, intro])
@pytest.mark.filterwarnings("ignore:CUDA is not available")
def test_a_forward_pass_stays_on_the_gpu(forward_pass, monkeypatch):
    """A fake GPU: a tensor on another device raises, as on a real one."""

    def tolist(sums):
        assert sums.device == CUDA
        return [1.0] * len(sums)

    monkeypatch.setattr(FakeTensor, "tolist", tolist)
    data.per_channel.cache_clear()  # it keeps tensors for the next call
    with FakeTensorMode():
        forward_pass()
    data.per_channel.cache_clear()


def results(exercise):
    return [json.loads(line) for line in (exercise / "logs/results.jsonl").open()]


@pytest.mark.parametrize(
    "launch, script, cores",
    [
        ("run.sh", NAME, "1 CPU core = 13"),
        ("run-2gpus.sh", f"{NAME}_multigpu", "2 CPU cores = 26"),
    ],
)
def test_every_script_runs_and_adds_a_line(launch, script, cores, exercise, sample):
    """Batches of 13 leave a last batch of one image."""
    command = ["bash", launch, f"{script}.py", *QUICK, "--batch-size=13"]
    done = run(command, exercise, sample)
    assert (done.returncode, done.stderr) == (0, "")
    for line in (
        f"Batch size: 13 per CPU core x {cores}",
        r"Epoch 2: [\d.]+ s, .*train loss [\d.]+ accuracy [\d.]+ %; validation loss",
        r"Total training time: [\d.]+ s",
        r"Testing \(pretrained, before fine-tuning\): accuracy [\d.]+ %",
        r"Testing \(pretrained, after fine-tuning\): accuracy [\d.]+ %",
    ):
        assert len(re.findall(f"^{line}", done.stdout, re.M)) == 1, line
    (result,) = results(exercise)  # written by one process alone
    assert f"{result['gpus']} CPU" in cores and result["options"]["batch_size"] == 13
    assert len(list((exercise / "logs").iterdir())) == 1


@pytest.mark.slow
def test_the_demo_learns_and_compares(tmp_path):
    checkout = copy_checkout(tmp_path)
    job = {"SLURM_JOB_ID": "7", "SLURM_GPUS_ON_NODE": "1"}  # as in JupyterHub
    done = run(["bash", "demo.sh"], checkout, timeout=550, **job)
    assert done.returncode == 0 and "speed-up" in done.stdout, done.stderr
    one, two = results(checkout / "exercise8")
    assert (one["gpus"], two["gpus"]) == (1, 2)
    assert one["accuracy"] > 90 and two["accuracy"] > 90
