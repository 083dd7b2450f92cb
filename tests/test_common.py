"""common/: imports, ranks, devices, forward passes on a fake GPU, whole runs."""

import json
import re
import shutil
import sys
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from conftest import (
    QUICK,
    REPOSITORY,
    copy_checkout,
    load,
    raises_user_error,
    run,
)
from torch._subclasses import FakeTensor, FakeTensorMode

from common import data
from common.device import get_device, get_ranks, pick_dtype
from common.log import RunLog

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


OWN = """
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler, TensorDataset

from common.data import make_loader
from common.device import get_device, get_ranks
from common.errors import run


def main():
    rank, local_rank, world_size = get_ranks()
    device = get_device(local_rank)
    dist.init_process_group()
    data = TensorDataset(torch.randn(64, 20))
    model = DistributedDataParallel(torch.nn.Linear(20, 2).to(device))
    for (inputs,) in make_loader(data, 8, device, sampler=DistributedSampler(data)):
        model(inputs.to(device)).sum().backward()
    print(f"rank {rank} of {world_size} is done\\n", end="")  # one write
    dist.destroy_process_group()


run(main)
"""


def test_a_students_own_script_works_elsewhere(tmp_path):
    """By plain torchrun, and without RunLog."""
    shutil.copytree(REPOSITORY / "common", tmp_path / "common")
    (tmp_path / "own.py").write_text(OWN)
    launch = [Path(sys.executable).with_name("torchrun"), "--standalone"]
    launch.append("--local-addr=127.0.0.1")  # the machine may not know its name
    quiet = {"TORCH_CPP_LOG_LEVEL": "ERROR"}  # Gloo warns of an unknown host name
    done = run([*launch, "--nproc-per-node=2", "own.py"], tmp_path, **quiet)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    ends = "rank 0 of 2 is done\nrank 1 of 2 is done\n"
    assert "".join(sorted(done.stdout.splitlines(True))) == ends
    assert {file.name for file in tmp_path.iterdir()} == {"common", "own.py"}


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


def test_get_device_picks_a_gpu(fake_gpus, monkeypatch):
    module = fake_gpus(count=4)
    assert get_device() == CUDA and get_device(3) == torch.device("cuda", 3)
    assert module.chosen == [0, 3]
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    with raises_user_error(r"8 processes, but 4 GPU.*--nproc-per-node=4"):
        get_device(1)


def test_ranks_share_gpus_only_if_asked_to(fake_gpus, monkeypatch):
    module = fake_gpus(count=2)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    with raises_user_error("2 GPU on this node.*NCCL_MULTI_RANK_GPU_ENABLE=1"):
        get_device(3)
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    assert [get_device(rank).index for rank in range(4)] == [0, 1, 0, 1]
    assert module.chosen == [0, 1, 0, 1]


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
    fake_gpus(is_bf16_supported=lambda including_emulation: native)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: native, raising=False)
    assert pick_dtype(device) == chosen and pick_dtype(device, "fp32") is None


def on_gpu(make, *args):
    """Return a module made on the GPU; .to() fails with fake tensors."""
    with CUDA:
        return make(*args)


def batches(*shape, dtype=torch.long):
    """Return a loader of one batch: images (4, *shape) and labels."""
    return [(torch.zeros(4, *shape, dtype=torch.uint8), torch.zeros(4, dtype=dtype))]


def of_exercise8(script):
    model = on_gpu(script.Classifier, "tinyvgg", "none")
    loader = batches(3, 150, 150, dtype=torch.float)
    images = script.normalise(loader[0][0].to(CUDA), script.MEAN, script.STD)
    model(script.augment(images))
    script.evaluate(model, loader, CUDA)


def of_mnist(script):
    log = RunLog(Namespace(batch_size=4), CPU, enabled=False)
    script.test(on_gpu(script.Net), CUDA, batches(1, 28, 28), log)


def of_cifar(script):
    model = on_gpu(script.Classifier, "resnet18", 40, torch.bfloat16)
    script.evaluate(model, batches(3, 32, 32), CUDA)


def of_cinic(script):
    model = on_gpu(script.Classifier, "resnet18", torch.float16)
    loader = batches(3, 32, 32)
    model(script.crop_and_flip(loader[0][0].to(CUDA)))
    script.evaluate(model, loader, CUDA)


def of_intro(script):
    model = on_gpu(script.Transformer, 2, 16, 2, 8)
    tokens = torch.zeros(4, 8, dtype=torch.long).to(CUDA)
    output = model(tokens).flatten(0, 1)
    loss = script.cross_entropy(output, tokens.flatten())
    script.batch_sums(loss, output.argmax(dim=1) == tokens.flatten())


@pytest.mark.parametrize(
    "forward, exercise, name",
    [
        (of_exercise8, "exercise8", NAME),
        (of_mnist, "mnist_multigpu", "mnist_singlegpu"),
        (of_cifar, "cifar100_demo", "train_cifar100"),
        (of_cinic, "cinic_lab", "cinic_amp"),
        (of_intro, "dp_ddp_intro", "single"),
    ],
)
@pytest.mark.filterwarnings("ignore:CUDA is not available")
def test_a_forward_pass_stays_on_the_gpu(forward, exercise, name, monkeypatch):
    """A fake GPU: a tensor on another device raises, as on a real one."""

    def tolist(sums):
        assert sums.device == CUDA
        return [1.0] * len(sums)

    monkeypatch.setattr(FakeTensor, "tolist", tolist)
    data.per_channel.cache_clear()  # it keeps tensors for the next call
    with FakeTensorMode():
        forward(load(exercise, name))
        with pytest.raises(RuntimeError, match="device"):
            torch.zeros(3, device=CUDA) + torch.zeros(3)
    data.per_channel.cache_clear()


def test_a_run_works_on_other_kinds_of_gpu(tmp_path, fake_gpus, monkeypatch):
    """Name and memory come from its own module."""
    name, peak = lambda _: "Data Center GPU Max 1550", lambda _: 2e9
    fake_gpus(kind="xpu", get_device_name=name, max_memory_allocated=peak)
    monkeypatch.chdir(tmp_path)
    args = Namespace(batch_size=8, epochs=3)
    log = RunLog(args, torch.device("xpu", 0))
    log.epoch(1, 8, 1.0)
    log.write_result(accuracy=0)
    result = json.loads(Path("logs/results.jsonl").read_text())
    assert result["device"] == "Data Center GPU Max 1550"
    assert result["peak_memory_gb"] == 2


def results(exercise):
    return [json.loads(line) for line in (exercise / "logs/results.jsonl").open()]


@pytest.mark.parametrize(
    "launch, script, cores",
    [
        ("run.sh", NAME, "1 CPU core = 13"),
        ("run-2gpus.sh", f"{NAME}_multigpu", "2 CPU cores = 26"),
    ],
)
def test_each_script_runs_and_writes_a_line(launch, script, cores, exercise, sample):
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
