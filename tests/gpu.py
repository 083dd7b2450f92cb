"""Tests of everything that needs a GPU, with one file of results to send.

    make test-gpu                  all rows, on one GPU or several
    make test-gpu GPU="--only ResNet --only mnist"    rows with one of these words
    make test-gpu GPU=--cpu        a part of it on two CPU cores: two minutes

Runs check.py, MNIST, ResNet-152 and VGG16 on one GPU and on all, each script for a
few steps, the checkup, measurements, a run that is killed and resumed, tests that
need a GPU, and the main rows of bench.py. The most telling rows come first. All take
12 to 30 minutes, an estimate: nobody has run them on a GPU.

The losses must be those of a CPU, and no step may wait for the GPU. A row that fails
or hangs does not stop the rest. Each row is saved at once in results/GPU-MODEL.json,
in place of the same row of an earlier run; a table follows at the end.
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
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from bench import BENCH, TORCHRUN, load, result_file, run_check, write
from common.data import REPOSITORY
from common.errors import UserError
from common.errors import run as run_main
from tools.check import REQUIRED_FILES
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
NO_PROFILER = """
class Profile:
    def __call__(self, function):
        return function
profile = Profile()
"""


class Failed(Exception):
    """A test that failed, with the reason in one line; or "skipped: " and why."""


def run(command, folder, limit=300, expected=0, **env):
    """Run a command in a folder; return its output, or raise Failed."""
    # In a new session, so that all its processes can be ended with it.
    job = subprocess.Popen(
        [str(word) for word in command],
        cwd=folder,
        env={**os.environ, **env},
        text=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        output, _ = job.communicate(timeout=limit)
    except BaseException as error:  # Ctrl-C does not reach another session
        os.killpg(
            job.pid, signal.SIGTERM
        )  # at SIGKILL, torchrun would leave its ranks
        if not isinstance(error, subprocess.TimeoutExpired):
            raise
        output, _ = job.communicate(timeout=60)
        last = (output.splitlines() or [""])[-1]
        raise Failed(f"timed out after {limit} s: {last}") from None
    if job.returncode != expected:
        lines = [line for line in output.splitlines() if line.strip()] or [""]
        pattern = r"^(\[rank\d+\]: )?\S*Error|  broken"
        wrong = [line for line in lines if re.search(pattern, line)]
        line = (wrong or lines[-1:])[0]
        if "found no compiler" in line:
            raise Failed(f"skipped: {line}")
        raise Failed(f"status {job.returncode}: {line}")
    return output


def launcher(script, processes):
    """Return the command that starts a script: Python, or torchrun for DDP."""
    if "init_process_group" in (REPOSITORY / script).read_text():
        return [*TORCHRUN, f"--nproc-per-node={processes}"]
    return [sys.executable]


def losses(output):
    return [
        float(number) for number in re.findall(r"[Ll]oss:?\s+(\d+\.\d+)", output)
    ]


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
    exercise, _, path = script.partition("/")
    (root / exercise / "logs").mkdir(exist_ok=True)
    command = [*launcher(script, processes), "../tests/count_waits.py", "logs/waits"]
    output = run([*command, path, *options.split()], root / exercise, **env)
    found, speeds = losses(output), re.findall(r"Epoch.* ([\d.]+) \w+/s", output)
    if not found:
        raise Failed("no loss was printed")
    row = {"loss": found[-1], "per_second": float(speeds[-1]) if speeds else None}
    row |= json.loads((root / exercise / "logs/waits.0").read_text())
    if on_cpu is not None:
        expected = on_cpu.result()
        if len(found) != len(expected):
            raise Failed(f"{len(found)} losses, but {len(expected)} on a CPU")
        # The last one: the loss of one batch depends on dropout.
        far = abs(found[-1] - expected[-1]) / expected[-1]
        row["far_from_cpu"] = far
        if far > TOLERANCE and Path(script).stem not in NOT_COMPARED:
            raise Failed(f"the last loss differs by {far:.0%} from the CPU's")
    if row["waits"] and Path(script).stem not in WAIT:
        raise Failed(f"each step waits for the GPU: {row['lines']}")
    return row


def train_at_full_size(root, exercise, one, all_gpus, options):
    """Train on one GPU and on all; per_second is the speed of the last epoch."""
    data, options = str(root.parent / "full"), f"--epochs 2 {options}"
    make_data(exercise, data, 2)
    one, all_gpus = f"{exercise}/{one}", f"{exercise}/{all_gpus}"
    row = {"one": train(root, one, 1, options, DATADIR=data)}
    row["all"] = train(
        root, all_gpus, torch.accelerator.device_count(), options, DATADIR=data
    )
    return row


def kill_and_resume(root):
    """Kill a run after its first checkpoint; resume it, and compare the loss."""
    folder = root / "cinic_lab"
    options = SMALL["cinic_lab"].split()
    command = [sys.executable, "cinic.py", *options, "--epochs=4"]
    whole = losses(run(command, folder))[-1]
    checkpoint = folder / "checkpoint.pth.tar"
    checkpoint.unlink()
    job = subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL)
    end = time.monotonic() + 300
    while not checkpoint.exists() and job.poll() is None and time.monotonic() < end:
        time.sleep(0.01)
    job.kill()
    job.wait()
    resumed = losses(run([*command, "--resume", checkpoint.name], folder))[-1]
    if abs(resumed - whole) > TOLERANCE * whole:
        raise Failed(f"the last loss is {resumed}, but {whole} without the kill")
    return {"loss": resumed, "loss_without_kill": whole}


def check_up(root, script, processes, expected):
    command = [
        *TORCHRUN,
        f"--nproc-per-node={processes}",
        "../tools/checkup",
        "--strict",
    ]
    run([*command, script], root / "clinic", expected=expected)


def measure(root, script, processes, *options):
    """Run a measurement of beyond_ddp/; return its output."""
    command = [*TORCHRUN, f"--nproc-per-node={processes}", script]
    output = run([*command, *options], root / "beyond_ddp")
    return {"output": output.splitlines()}


def run_tests():
    if not importlib.util.find_spec("pytest"):
        raise Failed("skipped: no pytest; run `pip install pytest`")
    command = [sys.executable, "-m", "pytest", "-q", "--override-ini", "addopts="]
    # Other files of tests may need what is not here, such as Git.
    files = [f for f in REPOSITORY.glob("tests/*.py") if "mark.gpu" in f.read_text()]
    run([*command, "-m", "gpu", *files], REPOSITORY, TEST_ON_GPUS="1")


def run_bench(root, exercise):
    """Return the rows of an exercise in bench.py's table, of a shorter run."""
    rows, launches = [], [[sys.executable]]
    if torch.accelerator.device_count() != 1:  # two GPUs, or two CPU cores
        launches.append([*TORCHRUN, "--nproc-per-node=2"])
    for launch in launches:
        output = run([*launch, f"{exercise}.py", 3, 0.5], BENCH, 600)
        rows += [json.loads(line) for line in output.splitlines() if line[:1] == "{"]
    return {"rows": rows}


def make_data(exercise, folder, scale):
    command = [sys.executable, "sample_data.py", "--to", folder, "--scale", scale]
    run(command, REPOSITORY / exercise)


class Table:
    """The rows of this run; each is saved as soon as it is known."""

    def __init__(self, file):
        self.file, self.rows = file, []
        self.about = {
            "torch": torch.__version__,
            "gpus": torch.accelerator.device_count(),
        }
        self.about["date"] = time.strftime("%F")

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
        results = [row["result"] for row in self.rows]
        return sum(not result.startswith(("ok", "skipped: ")) for result in results)


def list_scripts(processes, few):
    """Yield the training scripts of the pairs that can run here."""
    found = dict.fromkeys(script for pair in PAIRS for script in pair[:2])
    skipped = TWO if processes == 1 else []
    if not importlib.util.find_spec("wandb"):
        skipped = [*skipped, "cinic_wandb"]
    for script in found:
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
    scripts = list_scripts(processes, few)
    for script in sorted(scripts, key=lambda script: "mnist" not in script):
        yield script, train, gpu, script, processes, SMALL[script.partition("/")[0]]
    yield "a run that is killed and resumed", kill_and_resume, gpu
    for number in (1,) if few else range(1, 12):
        patient = f"patient{number}.py"
        if processes == 2:  # the bugs need two processes
            sick = number != 5  # patient 5 needs two nodes
            yield f"checkup of {patient}", check_up, gpu, patient, 2, int(sick)
        healthy = f"solutions/{patient}"
        yield f"checkup of {healthy}", check_up, gpu, healthy, processes, 0
    if processes == 2:
        yield "measure_memory.py", measure, gpu, "measure_memory.py", 2
        smaller = ["--width=64", "--length=32"] if few else []
        yield "measure_bubble.py", measure, gpu, "measure_bubble.py", 2, *smaller
    if not few:
        yield "tests that need a GPU", run_tests
    for exercise in ["dp_ddp_intro"] if few else REQUIRED_FILES:
        yield f"bench of {exercise}", run_bench, gpu, exercise


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
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--cpu", action="store_true", help="run a part of it on two CPU cores"
    )
    parser.add_argument(
        "--only",
        action="append",
        metavar="WORD",
        help="word of the rows to run, repeatable (default: all rows)",
    )
    args = parser.parse_args()
    if args.cpu:
        os.environ |= HIDE
    elif not torch.accelerator.device_count():
        raise UserError(
            "PyTorch finds no GPU; run a part on CPU cores with "
            "`make test-gpu GPU=--cpu`"
        )
    table = Table(Path("logs/test_gpu.json") if args.cpu else result_file())
    table.file.parent.mkdir(exist_ok=True)
    with TemporaryDirectory() as folder:
        root = Path(folder)
        for name in ("gpu", "cpu"):
            for exercise in (*SMALL, "clinic", "common", "tests", "tools"):
                shutil.copytree(
                    REPOSITORY / exercise,
                    root / name / exercise,
                    symlinks=True,
                    ignore=shutil.ignore_patterns("logs", "*.tar", "__pycache__"),
                )
        rows = list(list_rows(root / "gpu", args.cpu))
        words = args.only or [""]
        chosen = [row for row in rows if any(word in row[0] for word in words)]
        if not chosen:
            names = ", ".join(row[0] for row in rows)
            raise UserError(f"no row with {' or '.join(words)}; use one of {names}")
        os.environ |= {"DATADIR": str(root / "data"), "WANDB_MODE": "offline"}
        for exercise in SMALL.keys() - {"dp_ddp_intro", "beyond_ddp"}:
            make_data(exercise, root / "data", 0.2)
        shards = [sys.executable, "write_shards.py", "--tokens=1024"]
        run(shards, root / "gpu/beyond_ddp")
        if not importlib.util.find_spec("line_profiler"):
            (root / "line_profiler.py").write_text(NO_PROFILER)
            os.environ["PYTHONPATH"] = folder
        fill(table, root, chosen, args.cpu)
    failed = table.print()
    print(f"\n{failed} of {len(table.rows)} failed. Please send {table.file}")
    sys.exit(failed > 0)


if __name__ == "__main__":
    run_main(main)
