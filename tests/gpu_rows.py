"""The rows of `make test-gpu`: what each runs, and what is right."""

import gzip
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import namedtuple
from functools import partial
from pathlib import Path

import torch
from gpu_jobs import Failed, Job, explain, last_line
from gpu_losses import SIXTEEN_BITS_TOLERANCE, check, compare, find_losses
from record_script import record

from bench import BENCH, launches, run_check
from common.data import REPOSITORY
from tools.machine import REQUIRED_FILES
from tools.pairs import PAIRS

INTRO = "--layers 4 --width 64 --heads 4 --length 32 --sequences 256 --epochs 2"
INTRO += " --batch-size 8 --lr 0.003"
SMALL = {
    "exercise8": "--backbone tinyvgg --epochs 1 --finetune-epochs 1 --batch-size 10",
    "mnist_multigpu": "--epochs 1 --batch-size 64",
    # With 10 steps each would report, which waits for the GPU.
    "cifar100_demo": "--epochs 1 --arch resnet18 --image-size 40 --batch-size 16 "
    "--steps 30 --no-profile",
    "cinic_lab": "--epochs 1 --batch-size 50 --lr 0.003",
    "dp_ddp_intro": INTRO,
    "beyond_ddp": INTRO,
}
CNN = "exercise8", "mnist_multigpu", "cifar100_demo", "cinic_lab"
BATCHNORM = "cifar100_demo", "cinic_lab"
MIXED_PRECISION = {"cifar100_demo": ["--amp"], "cinic_lab": []}  # options for it
SCALE = {"cinic_lab": 0.4}  # of the synthetic data; of the others, SMALL_SCALE
SMALL_SCALE = 0.2
# The scripts that run on CPU cores: one of each exercise and kind.
FEW = ["train_cifar100", "mnist_ddp", "cinic_dp", "fsdp"]
WAIT = [
    *("model_parallel", "pipeline"),  # parts of a model wait for each other
    "experts",  # the CPU must know how many tokens each rank sends
]
# At full size: the exercise, its scripts for one GPU and for all, and options.
VGG16 = [f"pytorch_dvc_cnn_pretrained{end}.py" for end in ("", "_multigpu")]
RESNET = "train_cifar100.py", "train_ddp_cifar100.py", "--batch-size 32 --steps 30"
FULL = {
    "MNIST": ("mnist_multigpu", "mnist_singlegpu.py", "mnist_ddp.py", ""),
    "ResNet-152": ("cifar100_demo", *RESNET),
    "VGG16": ("exercise8", *VGG16, "--finetune-epochs 2 --weights none"),
}
RESUMED_TOLERANCE = 0.05
CHECKUP = "checkup/__main__.py"

# ranks: 1 or 2; alone: measures a speed or fills the memory
Row = namedtuple("Row", "name function args ranks alone", defaults=[(), 1, False])


def run(command, folder, limit=300):
    """Run a command in a folder; return its output, or raise Failed."""
    job = subprocess.Popen(
        [str(word) for word in command],
        cwd=folder,
        text=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,  # to end all its processes with it
    )
    try:
        output, _ = job.communicate(timeout=limit)
    except BaseException as error:  # Ctrl-C does not reach another session
        os.killpg(job.pid, signal.SIGTERM)  # SIGKILL would leave torchrun's ranks
        if not isinstance(error, subprocess.TimeoutExpired):
            raise
        output, _ = job.communicate(timeout=60)
        message = f"timed out after {limit} s: {last_line(output)}"
        raise Failed(message) from None
    if job.returncode:
        raise Failed(explain(job.returncode, output))
    return output


def ranks_of(script):
    """Return 2 for a script with process groups, else 0: one process."""
    text = (REPOSITORY / script).read_text()
    return 2 if "init_process_group" in text else 0


def run_recorded(folder, script, options, cnn=False, **how):
    """Run a training script; return its printed losses, speed, and records.

    how: what else Job() takes, such as variables of the environment.
    """
    freeze = cnn and script.startswith(BATCHNORM)
    patch = partial(record, draw_on_cpu=cnn, freeze=freeze)
    with Job(
        folder, script, *options, ranks=ranks_of(script), patch=patch, **how
    ) as job:
        output, records = job.wait(), job.records()
    speeds = re.findall(r"Epoch.* ([\d.]+) \w+/s", output)
    row = {"printed": find_losses(output)}
    row["per_second"] = float(speeds[-1]) if speeds else None
    row |= {name: records[0][name] for name in ("steps", "waits", "lines")}
    if cnn:
        names = "training", "evaluation", "weights"
        row["ranks"] = [{name: r[name] for name in names} for r in records]
    if row["waits"] and Path(script).stem not in WAIT:
        raise Failed(f"each step waits for the GPU: {row['lines']}", **row)
    return row


def train(root, script, expected, compared=True):
    """Train for a few steps; compare the losses with those of a CPU.

    compared: False returns the row alone, to record the losses.
    """
    exercise = script.partition("/")[0]
    text, cnn = (REPOSITORY / script).read_text(), exercise in CNN
    folder = root / script.replace("/", "-")
    options = SMALL[exercise].split()
    gpus = torch.accelerator.device_count()
    splits = "nn.DataParallel" in text and gpus > 1
    if splits and not cnn:  # the same batch as on one GPU
        batch = int(re.search(r"--batch-size (\d+)", SMALL[exercise])[1])
        options.append(f"--batch-size={batch // gpus}")
    mixed = cnn and '"--dtype"' in text
    precision = ["--dtype=fp32"] if mixed else []
    # TF32 rounds to three digits, which BatchNorm makes 1 % in two steps.
    env = {"NVIDIA_TF32_OVERRIDE": "0"} if cnn else {}
    row = run_recorded(folder, script, [*options, *precision], cnn, **env)
    if not compared:
        return row
    if splits and cnn:
        row["note"] = "not compared: BatchNorm sees a part of the batch on each GPU"
    else:
        try:
            row |= compare(row, expected)
        except Failed as error:
            raise Failed(str(error), **row) from None
    if mixed and gpus:
        options += MIXED_PRECISION[exercise]
        row["mixed"] = run_recorded(folder / "mixed", script, options, cnn)
        if not splits:
            first = [part["ranks"][0]["training"][0] for part in (row["mixed"], row)]
            check(*first, SIXTEEN_BITS_TOLERANCE, "the first loss in 16 bits")
    waits = {*row["lines"], *row.get("mixed", row)["lines"]}
    if own := [line for line in waits if ":" not in line]:
        row["note"] = f"PyTorch's own waits: {', '.join(sorted(own))}"
    return row


def train_at_full_size(root, results, name, exercise, one, all_gpus, options):
    """Train on one GPU and, if there are several, on all; sample the GPU's power."""
    data = root / "full"
    make_data(exercise, data, 2)
    options, row = ["--epochs=2", *options.split()], {}
    samples = results / f"utilisation-{name}.csv"
    monitor = [sys.executable, "monitor_gpus.py", samples, str(os.getpid())]
    sampling = subprocess.Popen(monitor, cwd=REPOSITORY / "cifar100_demo")
    try:
        for part, script in ("one", one), ("all", all_gpus):
            if part == "all" and torch.accelerator.device_count() < 2:
                break  # ranks that share a GPU are no faster
            folder = root / f"full-{part}-{name}"
            script = f"{exercise}/{script}"
            row[part] = run_recorded(folder, script, options, data=data)
    finally:
        sampling.terminate()
        sampling.wait()
    return row


def record_trace(root, results, script):
    """Save the profiler's trace of a training script in ten steps."""
    name = f"trace-{Path(script).stem}"
    # The data have more than the ten steps that the profiler needs.
    options = ["--epochs=1", "--steps=10", "--arch=resnet50", "--batch-size=32"]
    if not torch.accelerator.device_count():
        options += ["--image-size=40", "--arch=resnet18"]
    with Job(root / name, script, *options, ranks=ranks_of(script)) as job:
        job.wait()
        trace, *_ = sorted((job.folder / "logs/profiler").iterdir())
        packed = gzip.compress(trace.read_bytes())
    file = results / f"{name}.json.gz"
    file.write_bytes(packed)
    return {"file": file.name, "bytes": len(packed)}


def kill_and_resume(root):
    """Kill a run after its first checkpoint; resume it, and compare the losses."""
    script, name = "cinic_lab/cinic.py", "checkpoint.pth.tar"
    # Enough epochs that the kill comes before the end, however fast the GPU is.
    options = [*SMALL["cinic_lab"].split(), "--epochs=4"]
    patch = partial(record, draw_on_cpu=True, freeze=True)
    job = {"patch": patch, "NVIDIA_TF32_OVERRIDE": "0"}
    with Job(root / "resume-whole", script, *options, **job) as whole:
        whole.wait()
        steps = whole.records()[0]["training"]
    with Job(root / "resume-killed", script, *options, **job) as killed:
        checkpoint, end = killed.folder / name, time.monotonic() + 120
        while not checkpoint.exists() and time.monotonic() < end:
            time.sleep(0.01)
        killed.kill()
    options.append(f"--resume={checkpoint}")
    with Job(root / "resume-resumed", script, *options, **job) as resumed:
        resumed.wait()
        rest = resumed.records()[0]["training"]
    if not 0 < len(rest) < len(steps):
        raise Failed(f"{len(rest)} steps after the kill, and {len(steps)} without")
    what = "the first loss after the kill"
    check(rest[0], steps[-len(rest)], RESUMED_TOLERANCE, what)
    return {"losses": rest, "losses_without_kill": steps}


def launch(root, script, *options, expected=0):
    """Run a script on two ranks; return its output."""
    folder = root / "-".join([script, *options]).replace("/", "-")
    # A checkup's script is an option: it must be found from that folder.
    options = [REPOSITORY / o if o.endswith(".py") else o for o in options]
    with Job(folder, script, *options, ranks=2) as job:
        return {"output": job.wait(expected=expected).splitlines()}


def find_largest_batch(root):
    """Return the largest batches of cinic.py and cinic_amp.py that fit in memory."""
    with Job(root / "largest", "cinic_lab/largest_batch.py") as job:
        found = re.findall(r"(\d+) is the largest", job.wait(600))
    if len(found) != 2:
        raise Failed(f"{len(found)} largest batches, not 2")
    return {"largest": [int(n) for n in found]}


def split_batch(root):
    """Check that DataParallel gives each GPU its part of a batch."""
    options = [*INTRO.split(), "--epochs=1", "--verbose"]
    with Job(root / "split", "dp_ddp_intro/dp.py", *options) as job:
        output = job.wait()
    kind = torch.accelerator.current_accelerator()
    gpus = [f"{kind}:{i}" for i in range(torch.accelerator.device_count())]
    for device in gpus or ["cpu"]:
        if f"Hello from {device} with input size (8, 32)" not in output:
            raise Failed(f"{device} got no part of the batch")


def run_bench(exercise):
    """Return the rows of an exercise in bench.py's table, of a shorter run."""
    output = "".join(run(job, BENCH, 600) for job in launches(exercise, 3, 0.5))
    return {"rows": [json.loads(row) for row in re.findall(r"^{.*", output, re.M)]}


def make_data(exercise, folder, scale):
    command = [sys.executable, "sample_data.py", "--to", folder, "--scale", scale]
    run(command, REPOSITORY / exercise)


def list_scripts(few):
    """Yield the training scripts of the pairs that can run here."""
    skipped = [] if importlib.util.find_spec("wandb") else ["cinic_wandb"]
    for script in dict.fromkeys(script for pair in PAIRS for script in pair[:2]):
        name = Path(script).stem
        known = script.partition("/")[0] in SMALL and "tensorflow" not in script
        if known and name not in skipped and (name in FEW or not few):
            yield script


def list_rows(root, results, few, losses):
    """Yield the rows, the most telling first; few: a part of them on CPU cores.

    root: a folder for what the rows write; results: one for traces and samples.
    """
    if not few:
        yield Row("check.py", lambda: {"found": run_check()}, alone=True)
    for script in list_scripts(few):
        args = root, script, losses.get(script)
        yield Row(script, train, args, max(1, ranks_of(script)))
    yield Row("a run that is killed and resumed", kill_and_resume, (root,))
    for number in (1,) if few else range(1, 13):
        patient, fixed = (
            f"clinic/{f}patient{number}.py" for f in ("", "solutions/")
        )
        args = root, CHECKUP, "--strict", "--hang-timeout=30"
        fails = partial(launch, expected=int(number != 5))  # 5 needs two nodes
        yield Row(f"checkup of {patient}", fails, (*args, patient), 2)
        yield Row(f"checkup of {fixed}", launch, (*args, fixed), 2)
    small = ["--width=64", "--length=32"] if few else []
    measure = root, "beyond_ddp/measure_bubble.py", *small
    yield Row("measure_bubble.py", launch, measure, 2, alone=True)
    yield Row("dp.py uses all GPUs", split_batch, (root,))
    for script in "train_cifar100", "train_ddp_cifar100":
        args = root, results, f"cifar100_demo/{script}.py"
        row = Row(f"trace of {script}.py", record_trace, args, alone=True)
        yield row._replace(ranks=max(1, ranks_of(args[2])))
    if not few:
        for name, full in FULL.items():
            args = root, results, name, *full
            yield Row(f"{name} at full size", train_at_full_size, args, alone=True)
    for exercise in ["mnist_multigpu"] if few else REQUIRED_FILES:
        yield Row(f"bench of {exercise}", run_bench, (exercise,), alone=True)
    if not few:
        yield Row("largest_batch.py", find_largest_batch, (root,), alone=True)
