"""cinic_lab/: the ladder of scripts as students run it, and what DDP promises."""

import gc
import json
import math
import os
import re
import sys
import weakref
from argparse import Namespace
from itertools import chain

import pytest
import torch
import torch.distributed as dist
from conftest import REPOSITORY, copy_room, load, run
from ranks import FOLDER, Run
from test_pairs import PAIRS, differing_rows
from test_steps import Watch
from torch import nn

from common.log import Nothing, RunLog

State = load("cinic_lab", "state").State
NAMES = "loss", "acc1", "acc5"
CPU = torch.device("cpu")
QUICK = ("--epochs", "2", "--batch-size", "24", "--log-interval", "2")


@pytest.fixture
def room(tmp_path):
    return copy_room("cinic_lab", tmp_path)


def check(done, room, processes, steps):
    """Return the result of a run that went well: two epochs of so many steps."""
    assert done.returncode == 0 and "Warning" not in done.stderr, done.stderr
    number = r"\d+\.\d+"
    for epoch in (1, 2):
        line = rf"Time {number}  Data {number}  Loss {number}  Acc@1 {number}  Acc@5"
        shown = re.findall(
            rf"^Epoch: \[{epoch}\]\[(\d+)/{steps}\]  {line} {number}$",
            done.stdout,
            re.M,
        )
        assert shown == [str(batch) for batch in (*range(2, steps, 2), steps)]
    assert len(re.findall(rf"^ \* Acc@1 {number}  Acc@5", done.stdout, re.M)) == 2
    assert "\r" not in done.stdout  # no progress bar where there is no terminal
    (result,) = map(json.loads, (room / "logs/results.jsonl").open())
    assert (result["gpus"], result["images_per_epoch"]) == (processes, 100)
    for file in ("checkpoint.pth.tar", "model_best.pth.tar"):
        content = torch.load(room / file, weights_only=True)
        model = nn.ModuleDict({"resnet": resnet18()})
        model.load_state_dict(content["model"])  # bare: no module. in front
    assert len(content["random"]) == processes
    return result


def resnet18():
    from torchvision.models import resnet18

    return resnet18(num_classes=10)


@pytest.mark.parametrize(
    "launch, script, processes",
    [
        ("run.sh", "cinic.py", 1),
        ("run.sh", "cinic_amp.py", 1),
        ("run.sh", "cinic_tensorboard.py", 1),
        ("run-2gpus.sh", "cinic_dp.py", 1),
        ("run-2gpus.sh", "cinic_ddp.py", 2),
    ],
)
def test_a_run(launch, script, processes, room, sample):
    done = run(["bash", launch, script, *QUICK], room, sample)
    check(done, room, processes, 5 if processes == 1 else 3)
    scalars = list((room / "logs").glob("*/events*"))
    assert len(scalars) == (script not in ("cinic.py", "cinic_amp.py"))


def quick(room, sample, script, *options):
    """Run a script where PyTorch is imported already; return what run() does."""
    process = Run(room, sample, script, *QUICK, *options)
    status, said = process.join()[0], process.output()
    return Namespace(returncode=status, stdout=said, stderr=said)


@pytest.mark.slow
def test_float16_has_a_scaler(room, sample):
    few = "--dtype", "fp16", "--epochs", 1, "--batch-size", 48  # it is slow on a CPU
    done = quick(room, sample, "cinic_amp.py", *few)
    assert done.returncode == 0, done.stderr
    content = torch.load(room / "checkpoint.pth.tar", weights_only=True)
    assert content["scaler"]["scale"] > 1 and "nan" not in done.stdout


def test_tensorboard(room, sample):
    from tensorboard.backend.event_processing.event_accumulator import (
        EventAccumulator,
    )

    done = quick(room, sample, "cinic_tensorboard.py")
    check(done, room, 1, 5)
    (file,) = (room / "logs").glob("*/events*")
    events = EventAccumulator(str(file)).Reload()
    names = [f"{part}/{name}" for part in ("train", "validation") for name in NAMES]
    assert sorted(events.Tags()["scalars"]) == sorted([*names, "train/lr"])
    for name in names:
        steps = [5, 10] if "validation" in name else [2, 4, 5, 7, 9, 10]
        assert [scalar.step for scalar in events.Scalars(name)] == steps
    rates = [scalar.value for scalar in events.Scalars("train/lr")]
    assert rates == pytest.approx([0.1] * 3 + [0.05] * 3)
    shown = re.findall(r"Acc@1 ([\d.]+)  Acc@5 ([\d.]+)$", done.stdout, re.M)
    for i, name in enumerate(("acc1", "acc5")):
        values = [scalar.value for scalar in events.Scalars(f"train/{name}")]
        tested = [scalar.value for scalar in events.Scalars(f"validation/{name}")]
        values = [*values[:3], tested[0], *values[3:], tested[1]]
        assert values == pytest.approx([float(pair[i]) for pair in shown], abs=0.01)


def test_wandb_offline(room, sample, tmp_path):
    env = {"HOME": str(tmp_path), "WANDB_MODE": "offline"}
    done = run(["bash", "run.sh", "cinic_wandb.py", *QUICK], room, sample, **env)
    check(done, room, 1, 5)
    (file,) = (room / "logs").glob("wandb/offline-run-*/run-*.wandb")
    body = file.read_bytes()
    for name in (*NAMES, "lr"):
        assert f"train/{name}".encode() in body
        assert name == "lr" or f"validation/{name}".encode() in body


def test_wandb_without_a_key(room, sample, tmp_path, monkeypatch):
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    command = ["bash", "run.sh", "cinic_wandb.py", *QUICK]
    done = run(command, room, sample, HOME=str(tmp_path))
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1, done.stderr
    assert "`python -m wandb login`, or `export WANDB_MODE=offline`" in done.stderr
    assert not (room / "checkpoint.pth.tar").exists()


def test_the_readme_has_the_row_counts():
    text = (FOLDER / "README.md").read_text()
    row = r"^\| .+ \| `(\w+\.py)` \| `(\w+\.py)` \| (\d+) \|"
    shown = {
        (f"cinic_lab/{a}", f"cinic_lab/{b}"): int(n)
        for b, a, n in re.findall(row, text, re.M)
    }
    pairs = [pair[:2] for pair in PAIRS if pair[0].startswith("cinic_lab/")]
    assert shown == {pair: differing_rows(*pair) for pair in pairs}


def test_only_one_script_imports_wandb():
    importing = [
        file.name
        for file in chain(FOLDER.glob("*.py"), (REPOSITORY / "common").glob("*.py"))
        if re.search(r"^\s*(import|from) wandb", file.read_text(), re.M)
    ]
    assert importing == ["cinic_wandb.py"]


def train_on_shares(module, rank):
    """Make main() train for six steps on batches of 20, each rank on its share.

    Without augmentation, which is random; with BatchNorm as in evaluation, as its
    statistics are those of a process; in 32 bits.
    """

    class Classifier(module.Classifier):
        amp = "cpu", None, False

        def train(self, mode=True):
            return super().train(False)

    def main():
        ranks = int(os.environ.get("WORLD_SIZE", 1))
        torch.manual_seed(0)
        images = torch.randint(0, 256, (6, 20, 3, 32, 32), dtype=torch.uint8)
        labels = torch.randint(0, 10, (6, 20))
        share = slice(rank * 20 // ranks, (rank + 1) * 20 // ranks)
        loader = [(i[share], y[share]) for i, y in zip(images, labels, strict=True)]
        model = wrapped = Classifier("resnet18").train()
        for layer in model.modules():
            if isinstance(layer, nn.BatchNorm2d):
                layer.running_var.fill_(4)  # or the scores are huge
        before = {k: v.clone() for k, v in model.state_dict().items()}
        if ranks > 1:
            dist.init_process_group()
            wrapped = nn.parallel.DistributedDataParallel(model)
        optimizer = torch.optim.SGD(model.parameters(), 0.05, 0.9, weight_decay=1e-4)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 3)
        state = State(model, optimizer, scheduler, CPU)
        state.scaler = torch.amp.GradScaler("cpu", enabled=False)
        args = Namespace(log_interval=4, batch_size=20)
        log = RunLog(args, CPU, enabled=False)
        log.enabled = rank == 0  # to print, and no more
        module.train(args, wrapped, state, loader, CPU, log, Nothing())
        result = module.evaluate(model, loader[:1], CPU, log)
        seen = {"before": before, "after": model.state_dict(), "result": result}
        torch.save(seen, f"{rank}.pt")

    module.crop_and_flip = lambda images: images
    module.main = main


def test_two_halves_of_a_batch_train_like_the_whole(tmp_path):
    runs = []
    for script, ranks in (("cinic_tensorboard.py", 0), ("cinic_ddp.py", 2)):
        (tmp_path / script).mkdir()
        patch = train_on_shares
        runs.append(Run(tmp_path / script, "", script, ranks=ranks, patch=patch))
        assert set(runs[-1].join()) == {0}, runs[-1].output()
    whole, half, other = (
        torch.load(tmp_path / file)
        for file in (
            "cinic_tensorboard.py/0.pt",
            "cinic_ddp.py/0.pt",
            "cinic_ddp.py/1.pt",
        )
    )
    for name, value in whole["after"].items():
        torch.testing.assert_close(half["after"][name], value, rtol=0, atol=1e-5)
        assert torch.equal(half["after"][name], other["after"][name])
    name = "resnet.fc.weight"
    assert (whole["after"][name] - whole["before"][name]).abs().max() > 1e-3
    # What is shown is of both halves, and shown once.
    shown, both = (
        [float(x) for x in re.findall(r"(?:Loss|Acc@\d) ([\d.]+)", run.output())]
        for run in runs
    )
    assert len(shown) == 2 * 3 + 2 and both == pytest.approx(shown, abs=2e-4)
    assert half["result"] == other["result"] == pytest.approx(whole["result"])


def watch(module, rank):
    """Note what a process is given to train and to evaluate on, and with what."""
    seen, evaluate = {"orders": [], "random": [], "tested": []}, module.evaluate

    def dry_train(args, model, state, loader, device, log, *writer):
        seen["orders"].append(list(loader.sampler))
        seen["random"].append(torch.rand(1).item())
        for buffer in model.buffers():  # as if BatchNorm had seen other images
            buffer += rank
        state.optimizer.step()
        state.scheduler.step()

    def noting_evaluate(model, loader, device, log):
        result = evaluate(model, loader, device, log)
        indices = list(getattr(loader.dataset, "indices", range(20)))
        buffers = torch.cat([b.flatten().double() for b in model.buffers()])
        seen["tested"].append((indices, result, buffers))
        torch.save(seen, f"{rank}.pt")
        return result

    module.train, module.evaluate = dry_train, noting_evaluate


def test_shares_of_three_processes(sample, tmp_path):
    """20 images to validate on do not divide by 3, nor do 100 to train on."""
    (tmp_path / "1").mkdir()
    (tmp_path / "3").mkdir()
    options = "--epochs", 2
    one = Run(tmp_path / "1", sample, "cinic_tensorboard.py", *options, patch=watch)
    assert one.join() == [0], one.output()
    three = Run(
        tmp_path / "3", sample, "cinic_ddp.py", *options, ranks=3, patch=watch
    )
    assert three.join() == [0, 0, 0], three.output()
    (alone,) = (torch.load(tmp_path / "1/0.pt"),)
    seen = [torch.load(tmp_path / f"3/{rank}.pt") for rank in range(3)]
    assert len({rank["random"][0] for rank in seen}) == 3  # augmentation differs
    for epoch in (0, 1):
        trained = list(chain(*(rank["orders"][epoch] for rank in seen)))
        assert set(trained) == set(range(100)) and len(trained) == 102
        tested = [rank["tested"][epoch] for rank in seen]
        assert sorted(chain(*(indices for indices, *_ in tested))) == [*range(20)]
        for _, result, buffers in tested:
            assert result == pytest.approx(alone["tested"][epoch][1])
            assert torch.equal(buffers, tested[0][2])  # rank 0's BatchNorm
            assert torch.equal(buffers, alone["tested"][epoch][2])
    assert seen[0]["orders"][0] != seen[0]["orders"][1]
    files = sorted(path.name for path in (tmp_path / "3/logs").rglob("*"))
    # A folder, its events and checkpoints: one process writes.
    assert len(files) == 5 and {*files} > {"results.jsonl", "checkpoint.pth.tar"}
    assert three.output(1) == three.output(2) == ""  # one speaks for all


@pytest.mark.parametrize("batches", [3, 7])
def test_a_step_does_not_wait(batches):
    cinic = load("cinic_lab", "cinic")
    model = cinic.Classifier("resnet18")
    optimizer = torch.optim.SGD(model.parameters(), 0.01, 0.9)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 9)
    device = torch.device("cpu")
    state = State(model, optimizer, scheduler, device)
    images = torch.zeros(4, 3, 32, 32, dtype=torch.uint8)
    loader = [(images, torch.ones(4).long())] * batches
    args, reads = Namespace(log_interval=5, batch_size=4), []
    log = RunLog(args, device, enabled=False)
    cinic.train(args, model, state, loader[:1], device, log)  # fills caches
    tolist = torch.Tensor.tolist
    with Watch() as watching, pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            torch.Tensor, "tolist", lambda tensor: reads.append(1) or tolist(tensor)
        )
        cinic.train(args, model, state, loader, device, log)
        cinic.evaluate(model, loader, device, log)
    assert watching.waits == [] and len(reads) == (2 if batches < 5 else 3)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("script", ["cinic", "cinic_amp"])
def test_no_synchronisation_on_a_gpu(script, monkeypatch):
    module, device = load("cinic_lab", script), torch.device("cuda", 0)
    model = module.Classifier("resnet18").to(device)
    model.amp = "cuda", torch.bfloat16, True
    optimizer = torch.optim.SGD(model.parameters(), 0.01, 0.9)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 9)
    state = State(model, optimizer, scheduler, device)
    state.scaler = torch.amp.GradScaler("cuda", enabled=False)
    images = torch.zeros(4, 3, 32, 32, dtype=torch.uint8).pin_memory()
    loader = [(images, torch.ones(4).long().pin_memory())] * 3
    args, shown = Namespace(log_interval=5, batch_size=4), dict.fromkeys(NAMES, 0.0)
    log = RunLog(args, device, enabled=False)
    module.train(args, model, state, loader, device, log)
    monkeypatch.setattr(module, "means", lambda *args: shown)
    torch.cuda.set_sync_debug_mode("error")
    try:
        module.train(args, model, state, loader, device, log)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_archs():
    cinic = load("cinic_lab", "cinic")
    assert cinic.ARCHS[0] == "resnet18" and cinic.ARCHS[-1] == "resnet152"
    scores = cinic.Classifier("resnet18").eval()(
        torch.zeros(2, 3, 32, 32, dtype=torch.uint8)
    )
    assert scores.shape == (2, 10)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_is_in_the_model(dtype):
    """So it holds in DataParallel's threads, which do not know of the main one's."""
    cinic_amp = load("cinic_lab", "cinic_amp")
    model, seen = cinic_amp.Classifier("resnet18").eval(), []
    model.amp = "cpu", dtype, True
    model.resnet.layer1.register_forward_hook(
        lambda *args: seen.append(args[2].dtype)
    )
    scores = model(torch.zeros(2, 3, 32, 32, dtype=torch.uint8))
    assert seen == [dtype] and scores.dtype == torch.float32
    assert all(p.dtype == torch.float32 for p in model.parameters())


def look_for_largest(capacity, most=2**20, error=torch.OutOfMemoryError):
    """Return what largest_batch() finds where so many fit, and what it tried."""
    tried = []

    def attempt(batch_size):
        tried.append(batch_size)
        if batch_size > capacity:
            raise error("full\nat some place")

    return load("cinic_lab", "largest_batch").largest_batch(attempt, most), tried


@pytest.mark.parametrize("capacity", [1, 2, 3, 4, 37, 100, 127, 128, 1000, 4096])
def test_the_largest_batch(capacity):
    found, tried = look_for_largest(capacity)
    assert found <= capacity < max(found + 1, 1.05 * found)
    assert found in tried or found == capacity == 1  # 1: not even 2
    assert min(tried) == 2 and len(set(tried)) == len(tried)
    assert len(tried) <= math.log2(capacity) + 1 + 5  # 2**-5 is less than 5 %


@pytest.mark.parametrize("most, tried", [(8, [2, 4, 8]), (11, [2, 4, 8, 11])])
def test_the_largest_batch_asked_for(most, tried):
    assert look_for_largest(1000, most) == (most, tried)
    found, tried = look_for_largest(9, most)
    assert found == min(9, most) and max(tried) <= most


def test_any_error_but_the_first_is_no_memory(capsys):
    found, tried = look_for_largest(20, error=RuntimeError)
    assert (found, tried) == (20, [2, 4, 8, 16, 32, 24, 20, 22, 21])
    lines = [f"{size:7} full" for size in (32, 24, 22, 21)]
    assert capsys.readouterr().out.splitlines() == lines
    with pytest.raises(RuntimeError, match="full"):
        look_for_largest(1, error=RuntimeError)


def test_a_batch_that_fails_leaves_no_tensors(monkeypatch):
    """Or the next one would have less memory, and be taken for too large."""
    cinic, alive = load("cinic_lab", "cinic"), weakref.WeakSet()
    largest_batch, left = load("cinic_lab", "largest_batch"), []

    def train(args, model, state, batches, device, log):
        images, _ = batches[0]
        held = model(images)
        alive.update([model, held])
        if len(images) > 5:
            raise torch.OutOfMemoryError("full")

    def attempt(batch_size):
        left.append(len(alive))
        largest_batch.train(cinic, "resnet18", batch_size, CPU, None)

    monkeypatch.setattr(cinic, "train", train)
    monkeypatch.setattr(
        torch.cpu, "reset_peak_memory_stats", lambda device: None, raising=False
    )
    gc.disable()
    try:
        assert largest_batch.largest_batch(attempt, 64) == 5
    finally:
        gc.enable()
    assert left == [0] * 5  # before 2, 4, 8, 6, 5


def test_a_batch_is_trained_without_and_with_amp(monkeypatch):
    largest_batch, resets = load("cinic_lab", "largest_batch"), []
    monkeypatch.setattr(
        torch.cpu, "reset_peak_memory_stats", resets.append, raising=False
    )
    for script, dtype in (("cinic", None), ("cinic_amp", torch.float16)):
        module = load("cinic_lab", script)
        speed, memory = largest_batch.train(module, "resnet18", 2, CPU, dtype)
        assert speed > 0 and memory > 0
    assert resets == [CPU] * 4  # before the steps that count, too


def test_gpu_by_number(fake_gpus, monkeypatch):
    from common.cli import UserError
    from common.device import get_device

    chosen = fake_gpus(2).chosen
    monkeypatch.setattr(torch, "set_float32_matmul_precision", lambda which: None)
    assert str(get_device(gpu=1)) == "cuda:1" and chosen == [1]
    assert str(get_device()) == "cuda:0" and str(get_device(1)) == "cuda:1"
    with pytest.raises(UserError, match="no GPU 2 here: there are 2"):
        get_device(gpu=2)


@pytest.mark.slow
def test_the_notebook_runs_from_top_to_bottom(room, sample):
    stored = json.loads((FOLDER / "cinic.ipynb").read_text())
    assert not any(cell.get("outputs") for cell in stored["cells"])
    source = "".join(chain(*(cell["source"] for cell in stored["cells"])))
    assert "from cinic import" in source
    (room / "cinic.ipynb").write_text(
        json.dumps(stored).replace("epochs=3", "epochs=1")
    )
    command = [sys.executable, "-m", "nbconvert", "--to", "notebook", "--execute"]
    done = run([*command, "--inplace", "cinic.ipynb"], room, sample)
    assert done.returncode == 0, done.stderr
    cells = json.loads((room / "cinic.ipynb").read_text())["cells"]
    output = json.dumps([cell.get("outputs") for cell in cells])
    for word in ("Epoch: [1][1/1]", "Acc@5", "image/png"):
        assert word in output
    speeds = re.findall(r"(Classifier|DataParallel): \d+\.\d images/s", output)
    assert speeds == ["Classifier", "DataParallel"]  # part 4


def fails(room, datadir, options, *words, ranks=0, script="cinic.py"):
    run = Run(room, datadir, script, *options, ranks=ranks)
    assert run.join() == [2] * max(1, ranks), run.output()
    lines = [line for line in run.output().splitlines() if "Error" in line]
    assert len(lines) == 1 and lines[0].startswith("Error: "), run.output()
    for word in words:
        assert word in lines[0]
    assert "Traceback" not in run.output() and "Epoch" not in run.output()


@pytest.mark.parametrize(
    "options, words",
    [
        (["--gpu", "5"], "no GPU 5 here"),
        (["--arch", "vgg16"], "resnet152"),
        (["--resume", "checkpoint.pth.tar"], "no file 'checkpoint.pth.tar'"),
        (["--resume", ""], "no file '': leave out --resume"),
    ],
)
def test_mistakes(options, words, room, sample):
    fails(room, sample, options, words)
    assert not (room / "checkpoint.pth.tar").exists()


def test_no_data(room, tmp_path):
    fails(room, tmp_path / "none", [], "no data", "python download_data.py")


def test_ddp_wants_torchrun(room, sample):
    fails(room, sample, [], "--nproc-per-node=2 cinic_ddp.py", script="cinic_ddp.py")


def test_no_gpu_to_fill(room):
    fails(room, "", [], "no GPU here", script="largest_batch.py")
    done = run(["bash", "run.sh", "largest_batch.py", "--arch", "resnet152"], room)
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch("Error: no GPU here.*\n", done.stderr)
