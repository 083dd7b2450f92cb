"""Tests of everything that needs a GPU, with one file of results to send.

    make test-gpu                  all rows, on one GPU or several
    make test-gpu GPU="--only ResNet --only mnist"    rows with one of these words
    make test-gpu GPU=--cpu        a part of it on two CPU cores: three minutes

Runs check.py, MNIST, ResNet-152 and VGG16 on one GPU and on all, each script for a
few steps, a run that is killed and resumed, the checkup, measurements, and the rows
of bench.py. All take 12 to 30 minutes, an estimate: nobody has run them on a GPU.

The losses must be those of a CPU, and no step may wait for the GPU. A row that fails
or hangs does not stop the rest. Each row is saved at once in bench/results, in place
of the same row of an earlier run; a table follows at the end.
Exit status: 1 if something failed, 2 without a GPU.
"""

import argparse
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from bench import BENCH, TORCHRUN, launches, load, result_file, run_check, write
from common.data import REPOSITORY
from common.errors import UserError
from common.errors import run as run_main
from tools.machine import REQUIRED_FILES
from tools.pairs import PAIRS

SMALL = {
    "exercise8": "--backbone tinyvgg --epochs 2 --finetune-epochs 1 --batch-size 10",
    "mnist_multigpu": "--epochs 1 --batch-size 64",
    "cifar100_demo": "--epochs 1 --arch resnet18 --image-size 64 --batch-size 8 "
    "--steps 30",  # with 10 steps, each would report, which waits for the GPU
    "cinic_lab": "--epochs 2 --batch-size 20 --lr 0.01",
    "dp_ddp_intro": "--layers 4 --width 64 --heads 4 --length 32 --sequences 256 "
    "--epochs 2 --batch-size 8 --lr 0.003",
}
SMALL["beyond_ddp"] = SMALL["dp_ddp_intro"]
# At full size: the exercise, its scripts for one GPU and for all, and options.
VGG16 = [f"pytorch_dvc_cnn_pretrained{end}.py" for end in ("", "_multigpu")]
RESNET = "train_cifar100.py", "train_ddp_cifar100.py", "--batch-size 32 --steps 30"
FULL = {
    "MNIST": ("mnist_multigpu", "mnist_singlegpu.py", "mnist_ddp.py", ""),
    "ResNet-152": ("cifar100_demo", *RESNET),
    "VGG16": ("exercise8", *VGG16, "--finetune-epochs 2 --weights none"),
}
# The scripts that run on CPU cores: one of each exercise and kind.
FEW = ["train_cifar100", "mnist_ddp", "cinic_dp", "fsdp"]
TWO = ["model_parallel", "fsdp_tp"]  # need two GPUs
# A GPU has other random numbers for dropout and augmentation, and TF32 rounds.
TOLERANCE = 0.15
NOT_COMPARED = [
    # BatchNorm sees a part of the batch on each GPU, and all of it on the CPU.
    *("cinic_dp", "train_data_parallel"),
    "cinic_syncbn",  # rounding alone changes this loss by 13 %, also on a CPU
]
WAIT = [
    "cinic_syncbn",  # SyncBatchNorm waits inside PyTorch
    *("model_parallel", "pipeline"),  # parts of a model wait for each other
    "experts",  # the CPU must know how many tokens each rank sends
]
HIDE = {"CUDA_VISIBLE_DEVICES": "-1", "HIP_VISIBLE_DEVICES": "-1"}


class Failed(Exception):
    """A test that failed, with the reason in one line."""


def run(command, folder, limit=300, expected=0, **env):
    """Run a command in a folder; return its output, or raise Failed."""
    job = subprocess.Popen(
        [str(word) for word in command],
        cwd=folder,
        env={**os.environ, **env},
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
        line = output.strip().rpartition("\n")[2]
        raise Failed(f"timed out after {limit} s: {line}") from None
    if job.returncode != expected:
        wrong = re.search(r"^(\[rank\d+\]: )?\S*Error.*|^  broken.*", output, re.M)
        line = wrong[0] if wrong else output.strip().rpartition("\n")[2]
        raise Failed(f"status {job.returncode}: {line}")
    return output


def launcher(script, processes):
    """Return the command that starts a script: Python, or torchrun for DDP."""
    if "init_process_group" in (REPOSITORY / script).read_text():
        return [*TORCHRUN, f"--nproc-per-node={processes}"]
    return [sys.executable]


def losses(output):
    return [float(n) for n in re.findall(r"[Ll]oss:?\s+(\d+\.\d+)", output)]


def train_on_cpu(root, script, processes):
    """Return the losses on a CPU with the same global batch."""
    exercise, _, path = script.partition("/")
    command = [*launcher(script, processes), path, *SMALL[exercise].split()]
    if "nn.DataParallel" in (REPOSITORY / script).read_text():
        batch = int(re.search(r"--batch-size (\d+)", SMALL[exercise])[1])
        command.append(f"--batch-size={batch * torch.accelerator.device_count()}")
    return losses(run(command, root / exercise, 600, **HIDE))


def train(root, script, processes, options, on_cpu=None, **env):
    """Train for a few steps; on_cpu: a future of the losses on a CPU, or None."""
    (exercise, _, path), name = script.partition("/"), Path(script).stem
    (root / exercise / "logs").mkdir(exist_ok=True)
    command = [*launcher(script, processes), "../tests/count_waits.py", "logs/waits"]
    output = run([*command, path, *options.split()], root / exercise, **env)
    found, speeds = losses(output), re.findall(r"Epoch.* ([\d.]+) \w+/s", output)
    row = {"loss": found[-1], "per_second": float(speeds[-1]) if speeds else None}
    row |= json.loads((root / exercise / "logs/waits.0").read_text())
    if on_cpu is not None:
        expected = on_cpu.result()
        if len(found) != len(expected):
            raise Failed(f"{len(found)} losses, but {len(expected)} on a CPU")
        # The last one: the loss of one batch depends on dropout.
        row["far_from_cpu"] = far = abs(found[-1] / expected[-1] - 1)
        if far > TOLERANCE and name not in NOT_COMPARED:
            raise Failed(f"the last loss differs by {far:.0%} from the CPU's")
    if row["waits"] and name not in WAIT:
        raise Failed(f"each step waits for the GPU: {row['lines']}")
    return row


def train_at_full_size(root, exercise, one, all_gpus, options):
    """Train on one GPU and on all; per_second is the speed of the last epoch."""
    data, options = str(root.parent / "full"), f"--epochs 2 {options}"
    make_data(exercise, data, 2)
    one, all_gpus = f"{exercise}/{one}", f"{exercise}/{all_gpus}"
    row = {"one": train(root, one, 1, options, DATADIR=data)}
    gpus = torch.accelerator.device_count()
    return row | {"all": train(root, all_gpus, gpus, options, DATADIR=data)}


def kill_and_resume(root):
    """Kill a run after its first checkpoint; resume it, and compare the loss."""
    folder = root / "cinic_lab"
    command = [sys.executable, "cinic.py", *SMALL["cinic_lab"].split(), "--epochs=4"]
    whole = losses(run(command, folder))[-1]
    checkpoint = folder / "checkpoint.pth.tar"
    checkpoint.unlink()
    job = subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL)
    while not checkpoint.exists() and job.poll() is None:
        time.sleep(0.01)
    job.kill()
    job.wait()
    resumed = losses(run([*command, "--resume", checkpoint.name], folder))[-1]
    if abs(resumed - whole) > TOLERANCE * whole:
        raise Failed(f"the last loss is {resumed}, but {whole} without the kill")
    return {"loss": resumed, "loss_without_kill": whole}


def launch(folder, processes, *command, expected=0):
    """Run a command as this number of processes; return its output."""
    command = [*TORCHRUN, f"--nproc-per-node={processes}", *command]
    return {"output": run(command, folder, expected=expected).splitlines()}


def find_largest_batch(root):
    """Return the largest batches of cinic.py and cinic_amp.py that fit in memory."""
    output = run([sys.executable, "largest_batch.py"], root / "cinic_lab", 600)
    found = [int(n) for n in re.findall(r"(\d+) is the largest", output)]
    if len(found) != 2:
        raise Failed(f"{len(found)} largest batches, not 2")
    return {"largest": found}


def split_batch(root):
    """Check that DataParallel gives each GPU its part of a batch."""
    options = SMALL["dp_ddp_intro"].split()
    command = [sys.executable, "dp.py", *options, "--epochs=1", "--verbose"]
    output = run(command, root / "dp_ddp_intro")
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


class Table:
    """The rows of this run; each is saved as soon as it is known."""

    def __init__(self, file):
        self.file, self.rows = file, []
        self.about = {"torch": torch.__version__, "date": time.strftime("%F")}
        self.about["gpus"] = torch.accelerator.device_count()

    def add(self, what, attempt, *args):
        """Add a row: the dict that attempt(*args) returns, or its error."""
        print(f"{what} ...", flush=True)
        start, row = time.perf_counter(), {"what": what, "result": "ok"}
        try:
            row |= attempt(*args) or {}
        except Exception as error:  # whatever it is, the rest continues
            row["result"] = f"{error}"[:300]
            print(f"    {row['result']}", flush=True)
        row["seconds"] = round(time.perf_counter() - start, 1)
        self.rows.append(row | self.about)
        saved = load(self.file)
        rows = saved.get("test_gpu", {}).get("rows", [])
        rows = [earlier for earlier in rows if earlier["what"] != what]
        write(saved | {"test_gpu": {"rows": rows + self.rows[-1:]}}, self.file)

    def print(self):
        """Print the rows of this run; return the number of failures."""
        width = max(len(row["what"]) for row in self.rows)
        print(f"\n{'what':{width}}  seconds  result")
        for row in self.rows:
            print(f"{row['what']:{width}}  {row['seconds']:7.1f}  {row['result']}")
        return sum(row["result"] != "ok" for row in self.rows)


def list_scripts(processes, few):
    """Yield the training scripts of the pairs that can run here."""
    skipped = list(TWO) if processes == 1 else []
    if not importlib.util.find_spec("wandb"):
        skipped.append("cinic_wandb")
    for script in dict.fromkeys(script for pair in PAIRS for script in pair[:2]):
        name = Path(script).stem
        known = script.partition("/")[0] in SMALL and "tensorflow" not in script
        if known and name not in skipped and (name in FEW or not few):
            yield script


def list_rows(gpu, few):
    """Yield each row's name, function and arguments; few: a part on CPU cores."""
    processes = 2 if few else min(2, torch.accelerator.device_count())
    if not few:
        yield "check.py", lambda: {"found": run_check()}
        for name, full in FULL.items():
            yield f"{name} on one GPU and on all", train_at_full_size, gpu, *full
    for script in list_scripts(processes, few):
        yield script, train, gpu, script, processes, SMALL[script.partition("/")[0]]
    yield "a run that is killed and resumed", kill_and_resume, gpu
    clinic, beyond = gpu / "clinic", gpu / "beyond_ddp"
    checkup = "../tools/checkup", "--strict"
    for number in (1,) if few else range(1, 13):
        patient, healthy = f"patient{number}.py", f"solutions/patient{number}.py"
        if processes == 2:  # the bugs need two processes
            start = partial(launch, expected=int(number != 5))  # 5 needs two nodes
            yield f"checkup of {patient}", start, clinic, 2, *checkup, patient
        yield f"checkup of {healthy}", launch, clinic, processes, *checkup, healthy
    if processes == 2:
        small = ["--width=64", "--length=32"] if few else []
        yield "measure_memory.py", launch, beyond, 2, "measure_memory.py"
        yield "measure_bubble.py", launch, beyond, 2, "measure_bubble.py", *small
    yield "dp.py uses all GPUs", split_batch, gpu
    if not few:
        yield "largest_batch.py", find_largest_batch, gpu
    for exercise in ["mnist_multigpu"] if few else REQUIRED_FILES:
        yield f"bench of {exercise}", run_bench, exercise


def fill(table, root, rows, few):
    """Run the rows; meanwhile their scripts train on CPU cores, for the losses."""
    pool, on_cpu = ThreadPoolExecutor(max(1, os.cpu_count() // 4)), {}
    try:
        for what, attempt, *args in rows:
            if attempt is train and not few:
                if not on_cpu:  # only now: the rows before measure speeds
                    for script, *_, number, _ in [r for r in rows if r[1] is train]:
                        job = train_on_cpu, root / "cpu", script, number
                        on_cpu[script] = pool.submit(*job)
                args.append(on_cpu[what])
            table.add(what, attempt, *args)
    finally:
        pool.shutdown(cancel_futures=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cpu", action="store_true", help="a part on two CPU cores")
    parser.add_argument("--only", action="append", help="word of the rows to run")
    args = parser.parse_args()
    if args.cpu:
        os.environ |= HIDE
    elif not torch.accelerator.device_count():
        raise UserError("PyTorch finds no GPU; type `make test-gpu GPU=--cpu`")
    table = Table(Path("logs/test_gpu.json") if args.cpu else result_file())
    table.file.parent.mkdir(exist_ok=True)
    with TemporaryDirectory() as folder:
        root = Path(folder)
        ignored = shutil.ignore_patterns("logs", "*.tar", "__pycache__")
        for name in (*SMALL, "clinic", "common", "tests", "tools"):
            copy = root / "gpu" / name
            shutil.copytree(REPOSITORY / name, copy, symlinks=True, ignore=ignored)
        shutil.copytree(root / "gpu", root / "cpu", symlinks=True)
        rows = list(list_rows(root / "gpu", args.cpu))
        words = args.only or [""]
        chosen = [row for row in rows if any(word in row[0] for word in words)]
        if not chosen:
            raise UserError(f"no row with {' or '.join(words)} in its name")
        os.environ |= {"DATADIR": str(root / "data"), "WANDB_MODE": "offline"}
        for exercise in SMALL.keys() - {"dp_ddp_intro", "beyond_ddp"}:
            make_data(exercise, root / "data", 0.2)
        shards = "write_shards.py", "--tokens=1024"
        run([sys.executable, *shards], root / "gpu/beyond_ddp")
        fill(table, root, chosen, args.cpu)
    failed = table.print()
    print(f"\n{failed} of {len(table.rows)} failed. Please send {table.file}")
    sys.exit(failed > 0)


if __name__ == "__main__":
    run_main(main)
