"""cinic_lab/: its scripts as students run them, largest_batch.py, SyncBatchNorm."""

import gc
import json
import re
import sys
import weakref
from functools import partial

import conftest
import pytest
import torch
import torch.distributed as dist
from conftest import REPOSITORY, copy_exercise, load, raises_user_error, run, slow
from fork_ranks import Run
from record_rank import record
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn

CPU = torch.device("cpu")
NAMES = "loss", "acc1", "acc5"
NUMBERS = [f"{part}/{name}" for part in ("train", "validation") for name in NAMES]
CURVES = [*NUMBERS, "train/lr"]
NOTEBOOK = json.loads((REPOSITORY / "cinic_lab/cinic.ipynb").read_text())
QUICK = ("--epochs", "2", "--batch-size", "24", "--log-interval", "2")


@pytest.fixture
def exercise(tmp_path):
    return copy_exercise("cinic_lab", tmp_path)


def check(output, exercise, processes, steps):
    """Check the output and the files of a run of two epochs."""
    assert "Warning" not in output, output
    number = r"\d+\.\d+"
    columns = rf"Time {number}  Data {number}  Loss {number}  Acc@1 {number}  Acc@5"
    for epoch in (1, 2):
        line = rf"^Epoch: \[{epoch}\]\[(\d+)/{steps}\]  {columns} {number}$"
        shown = re.findall(line, output, re.M)
        assert shown == [str(batch) for batch in (*range(2, steps, 2), steps)]
    assert len(re.findall(rf"^ \* Acc@1 {number}  Acc@5", output, re.M)) == 2
    (result,) = map(json.loads, (exercise / "logs/results.jsonl").open())
    assert (result["gpus"], result["per_epoch"]) == (processes, 100)
    assert result["gradient_bytes"] == 4 * 11_181_642
    for file in ("checkpoint.pth.tar", "model_best.pth.tar"):
        weights = torch.load(exercise / file, weights_only=True)["model"]
        assert "resnet.conv1.weight" in weights  # bare: no module. in front


@pytest.mark.parametrize(
    "launch, script, processes",
    [
        ("run.sh", "cinic.py", 1),
        ("run-dp.sh", "cinic_dp.py", 1),
        ("run-2gpus.sh", "cinic_ddp.py", 2),
    ],
)
def test_a_run(launch, script, processes, exercise, sample):
    done = run(["bash", launch, script, *QUICK], exercise, sample)
    assert done.returncode == 0, done.stderr
    check(done.stdout + done.stderr, exercise, processes, 5 if processes == 1 else 3)


@pytest.mark.slow
def test_float16_has_a_scaler(exercise, sample):
    few = "--dtype", "fp16", "--epochs", 1, "--batch-size", 48  # it is slow on a CPU
    process = Run(exercise, sample, "cinic_lab/cinic_amp.py", *QUICK, *few)
    assert process.join() == [0], process.output()
    content = torch.load(exercise / "checkpoint.pth.tar", weights_only=True)
    assert content["scaler"]["scale"] > 1 and "nan" not in process.output()
    assert "Autocast dtype: torch.float16\n" in process.output()


def test_tensorboard(exercise, sample):
    process = Run(exercise, sample, "cinic_lab/cinic_tensorboard.py", *QUICK)
    assert process.join() == [0], process.output()
    check(process.output(), exercise, 1, 5)
    (file,) = (exercise / "logs").glob("*/events*")
    events = EventAccumulator(str(file)).Reload()
    assert sorted(events.Tags()["scalars"]) == sorted(CURVES)
    for name in NUMBERS:
        steps = [5, 10] if "validation" in name else [2, 4, 5, 7, 9, 10]
        assert [scalar.step for scalar in events.Scalars(name)] == steps
    rates = [scalar.value for scalar in events.Scalars("train/lr")]
    assert rates == pytest.approx([0.1] * 3 + [0.05] * 3)
    shown = re.findall(r"^ \* Acc@1 ([\d.]+)", process.output(), re.M)
    values = [scalar.value for scalar in events.Scalars("validation/acc1")]
    assert values == pytest.approx([*map(float, shown)], abs=0.01)


def test_wandb_offline(exercise, sample, tmp_path):
    env = {"HOME": str(tmp_path), "WANDB_MODE": "offline"}
    done = run(["bash", "run.sh", "cinic_wandb.py", *QUICK], exercise, sample, **env)
    assert done.returncode == 0, done.stderr
    check(done.stdout + done.stderr, exercise, 1, 5)
    (file,) = (exercise / "logs").glob("wandb/offline-run-*/run-*.wandb")
    assert all(name.encode() in file.read_bytes() for name in CURVES)


def look_for_largest(capacity, most=2**20):
    """Return what largest_batch() finds if `capacity` fit, and what it tried."""
    tried = []

    def attempt(batch_size):
        tried.append(batch_size)
        if batch_size > capacity:  # any error may say so
            raise RuntimeError("full\nat some place")

    return load("cinic_lab", "largest_batch").largest_batch(attempt, most), tried


def test_the_largest_batch(capsys):
    for capacity in (1, 2, 3, 4, 37, 100, 127, 128, 1000, 4096):
        found, tried = look_for_largest(capacity)
        assert found <= capacity < max(found + 1, 1.05 * found)
        assert min(tried) == 2 and len(set(tried)) == len(tried)
    assert look_for_largest(1000, 11) == (11, [2, 4, 8, 11])
    assert look_for_largest(20) == (20, [2, 4, 8, 16, 32, 24, 20, 22, 21])
    assert capsys.readouterr().out.endswith(f"{21:7} full\n")


def test_a_batch_is_trained_and_one_that_fails_leaves_no_tensors(monkeypatch):
    """Otherwise the next one would have less memory, and seem too large."""
    largest_batch, cinic = (load("cinic_lab", n) for n in ("largest_batch", "cinic"))
    alive, left, train = weakref.WeakSet(), [], cinic.train

    def failing_train(model, batches, *args):
        images, _ = batches[0]
        alive.update([model, model(images)])
        if len(images) > 5:
            raise torch.OutOfMemoryError("full")
        return train(model, batches, *args)

    def attempt(batch_size):
        left.append(len(alive))
        assert min(largest_batch.train(cinic, "resnet18", batch_size, CPU, None)) > 0

    monkeypatch.setattr(cinic, "train", failing_train)
    reset = "reset_peak_memory_stats"
    monkeypatch.setattr(torch.cpu, reset, lambda device: None, raising=False)
    gc.disable()
    try:
        assert largest_batch.largest_batch(attempt, 64) == 5
    finally:
        gc.enable()
    assert left == [0] * 5  # before 2, 4, 8, 6, 5


# check_part.py grades what students write in parts 1 to 4.


def grade(part, script, exercise, sample):
    """Return the exit status of check_part.py, and what it reports as missing."""
    process = Run(exercise, sample, "cinic_lab/check_part.py", part, script)
    (status,) = process.join()
    return status, re.findall("^missing  (.*?):", process.output(), re.M)


@pytest.mark.parametrize(
    "part, missing",
    [
        ("amp", ["training in 16 bits", "validation in 16 bits", "a GradScaler"]),
        slow("tensorboard", [*CURVES, "a closed file"]),
        slow("wandb", ["the options", *CURVES, "a finished run"]),
        slow("dp", ["training in DataParallel"]),
    ],
)
def test_a_part_is_graded(part, missing, exercise, sample):
    for name, graded in (f"cinic_{part}.py", (0, [])), ("cinic.py", (1, missing)):
        text = (exercise / name).read_text() + "raise SystemExit\n"
        (exercise / "mine.py").write_text(text)
        assert grade(part, "mine.py", exercise, sample) == graded
    assert not list(exercise.glob("logs/*")) + list(exercise.glob("*.tar"))


BLOCK = "enabled=bool(self.dtype))"
BACKWARD = "scaler.scale(loss).backward()"
BARE, OUTSIDE = "a checkpoint of the bare model", "backward() outside of autocast"
WITHIN = "with torch.autocast(loss.device.type)"
TRAIN = f"{BLOCK} if self.training else torch.no_grad()"
OPTIONS = "args = parser.parse_args()"
EVERY = f"{OPTIONS}; args.log_interval = 1"


@pytest.mark.slow
@pytest.mark.parametrize(
    "part, code, wrong, missing",
    [
        ("amp", BLOCK, TRAIN, ["validation in 16 bits"]),
        ("amp", "(x).float()", "(x)", ["the loss in 32 bits"]),
        ("amp", BACKWARD, f"{WITHIN}: {BACKWARD}", [OUTSIDE]),
        ("amp", "pick_dtype(device, args.dtype)", "torch.half", ["a GradScaler"]),
        ("tensorboard", "writer.close()", "pass", ["a closed file"]),
        ("tensorboard", "+ step  #", "+ 6 - step % 6  #", ["one growing x axis"]),
        ("tensorboard", "epoch * num_steps", "epoch", ["one growing x axis"]),
        ("tensorboard", OPTIONS, EVERY, ["points for some batches only"]),
        ("wandb", ", config=config", "", ["the options"]),
        ("wandb", "wandb.finish()", "pass", ["a finished run"]),
        ("dp", "State(args, model", "State(args, dp_model", [BARE]),
    ],
)
def test_a_mistake_in_a_part_is_named(part, code, wrong, missing, exercise, sample):
    text = (exercise / f"cinic_{part}.py").read_text()
    assert text.count(code) == 1
    text = text.replace(code, wrong).replace("dtype == torch.float16", "False")
    if wrong == "(x)":  # and the scores in 16 bits on CPUs without bf16 as well
        text = text.replace("pick_dtype(device, args.dtype)", "torch.bfloat16")
    if wrong in ("(x)", "torch.half"):  # slow on CPUs: smaller images
        text = text.replace("normalise(x.", "normalise(x[..., ::4, ::4].")
    (exercise / "mine.py").write_text(text)
    assert grade(part, "mine.py", exercise, sample) == (1, missing)


def test_the_notebook_has_the_model_and_the_functions_of_the_script():
    parts = (REPOSITORY / "cinic_lab/cinic.py").read_text().split("\n\n\n")
    equal = {*parts} & {"".join(cell["source"]) for cell in NOTEBOOK["cells"]}
    names = {re.match(r"(@.*\n)?\w+ (\w+)", part)[2] for part in equal}
    assert names == {"Classifier", "train", "evaluate"}


def kinds_of_outputs(cell):
    """Return what a cell shows: text, tables, pictures, but no progress bars."""
    outputs = [o for o in cell.get("outputs", []) if o.get("name") != "stderr"]
    return {(o["output_type"], *sorted(o.get("data", []))) for o in outputs}


@pytest.mark.slow
def test_the_notebook_runs_from_top_to_bottom(exercise, sample):
    shorter = json.dumps(NOTEBOOK).replace("epochs=3", "epochs=1")
    (exercise / "cinic.ipynb").write_text(shorter)
    command = [sys.executable, "-m", "nbconvert", "--to", "notebook", "--execute"]
    done = run([*command, "--inplace", "cinic.ipynb"], exercise, sample)
    assert done.returncode == 0, done.stderr
    cells = json.loads((exercise / "cinic.ipynb").read_text())["cells"]
    output = json.dumps([cell.get("outputs") for cell in cells])
    kinds = [kinds_of_outputs(cell) for cell in cells]
    assert kinds == [kinds_of_outputs(cell) for cell in NOTEBOOK["cells"]]
    assert "Acc@5" in output and "image/png" in output
    assert re.findall(r"Epoch (\d): Time", output) == ["1"]
    speeds = re.findall(r"(Classifier|DataParallel): \d+\.\d images/s", output)
    assert speeds == ["Classifier", "DataParallel"]  # part 4


def test_mistakes():
    with raises_user_error("no GPU here"):
        conftest.call(load("cinic_lab", "largest_batch"))
    with raises_user_error("no script my_amp.py: make one"):
        conftest.call(load("cinic_lab", "check_part"), "amp", "my_amp.py")


def batches(channels=6):
    """Return two batches (10, C, 5, 4) with a large mean, and their gradients.

    A variance below 1 beside a mean of 100 loses its digits if it is calculated as
    mean(x * x) - mean * mean.
    """
    torch.manual_seed(0)
    offset = torch.linspace(-100, 100, channels).view(-1, 1, 1)
    x = torch.randn(2, 10, channels, 5, 4) * torch.rand(channels, 1, 1) * 3 + offset
    return x, torch.randn(2, 10, channels, 5, 4)


def step_by_step(layer, x, gradients, dtype=torch.float32):
    """Return a layer's outputs, gradients and buffers for two batches."""
    torch.manual_seed(1)
    nn.init.normal_(layer.weight)
    nn.init.normal_(layer.bias)
    seen = {"y": [], "x.grad": []}
    for batch, gradient in zip(x, gradients, strict=True):
        batch = batch.to(dtype, memory_format=torch.channels_last).requires_grad_()
        with torch.autocast("cpu", enabled=dtype != torch.float32):
            y = layer(batch)
        assert y.dtype == dtype
        assert y.is_contiguous(memory_format=torch.channels_last)
        (y * gradient).sum().backward()
        seen["y"].append(y.detach())
        seen["x.grad"].append(batch.grad)
    seen |= {"weight": layer.weight.grad, "bias": layer.bias.grad}
    seen |= {name: buffer.clone() for name, buffer in layer.named_buffers()}
    seen["evaluated"] = layer.eval()(x[0]).detach()
    return seen


def normalise_parts(module, rank, *, sizes, dtype):
    """Make main() normalise this rank's part of the batches and save the result."""

    def main():
        dist.init_process_group()
        layer = nn.BatchNorm2d(6, momentum=0.3)
        layer = module.nn.SyncBatchNorm.convert_sync_batchnorm(layer)
        layer = module.sync_on_cpu(layer)
        x, gradients = (t.split(sizes, 1)[rank] for t in batches())
        torch.save(step_by_step(layer, x, gradients, dtype), f"{rank}.pt")
        dist.destroy_process_group()

    module.main = main


@pytest.mark.parametrize(
    "sizes, dtype", [((1, 2, 7), torch.float32), ((3, 7), torch.bfloat16)], ids=str
)
def test_parts_of_a_batch_are_normalised_like_the_whole(sizes, dtype, tmp_path):
    patch = partial(normalise_parts, sizes=sizes, dtype=dtype)
    script = "cinic_lab/cinic_syncbn.py"
    parts = Run(tmp_path, "", script, ranks=len(sizes), patch=patch).results()
    whole = step_by_step(nn.BatchNorm2d(6, momentum=0.3), *batches(), dtype)
    rtol, atol = (1e-5, 1e-5) if dtype == torch.float32 else (0.016, 1e-3)
    close = partial(torch.testing.assert_close, rtol=rtol, atol=atol)
    for step in (0, 1):
        for name in ("y", "x.grad"):
            close(torch.cat([part[name][step] for part in parts]), whole[name][step])
    for name in ("weight", "bias"):
        summed = sum(part[name] for part in parts)
        close(summed, whole[name], rtol=1e-4, atol=100 * atol)
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        for part in parts:
            assert torch.equal(part[name], parts[0][name])
            close(part[name], whole[name], rtol=1e-5, atol=1e-5)
    evaluated = torch.cat([part["evaluated"] for part in parts])
    close(evaluated, whole["evaluated"], rtol=1e-5, atol=1e-3)


def test_a_resnet_with_syncbatchnorm_trains_as_one_process_does(sample, tmp_path):
    """Its running statistics, used in evaluation, are checked as well."""
    patch = partial(record, batchnorm=nn.BatchNorm2d)
    options = "--epochs", 2, "--lr", 0.00003, "--seed", 0, "--dtype", "fp32"
    runs = []
    for script, ranks in (("cinic_tensorboard", 0), ("cinic_syncbn", 2)):
        size = "--batch-size", 12 // max(1, ranks)
        (tmp_path / script).mkdir()
        command = tmp_path / script, sample, f"cinic_lab/{script}.py", *options
        runs.append(Run(*command, *size, ranks=ranks, patch=patch).results())
    (alone,), ranks = runs
    losses = [mean["loss"] for mean in alone["means"]]
    for rank in ranks:
        means = [mean["loss"] for mean in rank["means"]]
        # CPUs round differently, by 2e-4; BatchNorm without Sync differs by 3e-2.
        assert means == pytest.approx(losses, rel=1e-3)
    assert all(map(torch.equal, ranks[0]["weights"], ranks[1]["weights"]))


def test_every_batchnorm_is_converted():
    syncbn, cinic_ddp = (load("cinic_lab", name) for name in ("syncbn", "cinic_ddp"))
    model = cinic_ddp.Classifier("resnet18")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    converted = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    converted = syncbn.sync_on_cpu(converted)
    types = [type(module) for module in converted.modules()]
    assert types.count(syncbn.SyncBatchNorm2d) == 20
    assert nn.BatchNorm2d not in types and nn.SyncBatchNorm not in types
    # So any script can resume from the checkpoint.
    after = converted.state_dict()
    assert [*after] == [*before]
    assert all(torch.equal(after[name], before[name]) for name in before)


@pytest.mark.slow
def test_the_command_in_the_answers_prints_their_flops():
    answers = (REPOSITORY / "cinic_lab/ANSWERS.md").read_text()
    (code,) = re.findall(r"python -c '(from get_parameters .*)'", answers)
    done = run([sys.executable, "-c", code], REPOSITORY / "cifar100_demo")
    assert f"{float(done.stdout) / 1e9:.3f} GFLOP per" in answers, done.stderr
