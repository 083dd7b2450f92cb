"""Tests of everything that needs a GPU, with one file of results to send.

    make test-gpu                  one GPU or several: about ten minutes
    make test-gpu GPU=--cpu        a part of it on two CPU cores: two minutes

Runs check.py, each training script for a few steps, the checkup, measurements, a run
that is killed and resumed, the tests that need a GPU, and the main rows of bench.py.
The losses must be those of a CPU, and no step may wait for the GPU. After a failure
the rest continues; a table follows at the end. The file is results/GPU-MODEL.json.
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
from check import REQUIRED_FILES

from bench import TORCHRUN, load, measure_rows, result_file, run_check, write
from common.data import REPOSITORY
from common.errors import UserError
from common.errors import run as run_main
from pairs import PAIRS

SMALL = {
    "exercise8": "--backbone tinyvgg --epochs 2 --finetune-epochs 1 --batch-size 10",
    "mnist_multigpu": "--epochs 1 --batch-size 64",
    "cifar100_demo": "--epochs 1 --arch resnet18 --image-size 64 --batch-size 8 "
    "--steps 10",
    "cinic_lab": "--epochs 2 --batch-size 20 --lr 0.01",
    "dp_ddp_intro": "--layers 4 --width 64 --heads 4 --length 32 --sequences 128 "
    "--epochs 2 --batch-size 8 --lr 0.003",
}
# The scripts that run on CPU cores: one of each exercise and kind.
FEW = ["train_cifar100", "mnist_ddp", "cinic_dp", "fsdp"]
TWO = ["model_parallel", "fsdp_tp"]  # need two GPUs
# A GPU has other random numbers for dropout and augmentation, and TF32 rounds.
TOLERANCE = 0.15
# BatchNorm sees a part of the batch on each GPU, and all of it on the CPU.
HALVES = ["cinic_dp", "train_data_parallel"]
# SyncBatchNorm waits inside PyTorch, and parts of a model wait for each other.
WAIT = ["cinic_syncbn", "model_parallel", "pipeline"]
HIDE = {"CUDA_VISIBLE_DEVICES": "-1", "HIP_VISIBLE_DEVICES": "-1"}
NO_PROFILER = """
class Profile:
    def __call__(self, function):
        return function
profile = Profile()
"""


class Failed(Exception):
    """A test that failed, with the reason in one line."""


def run(command, folder, limit=300, expected=0, **env):
    """Run a command in a folder; return its output, or raise Failed."""
    # In a new session, so that its ranks can be killed with it.
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
    except subprocess.TimeoutExpired:
        os.killpg(job.pid, signal.SIGKILL)
        output, _ = job.communicate()
        last = (output.splitlines() or [""])[-1]
        raise Failed(f"timed out after {limit} s: {last}") from None
    if job.returncode != expected:
        lines = [line for line in output.splitlines() if line.strip()] or [""]
        wrong = [
            line
            for line in lines
            if re.search(r"^(\[rank\d+\]: )?\S*Error|  broken", line)
        ]
        raise Failed(f"status {job.returncode}: {(wrong or lines[-1:])[0]}")
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


def train(root, script, processes, on_cpu):
    """Train for a few steps; on_cpu: a future of the losses on a CPU, or None."""
    exercise, _, path = script.partition("/")
    (root / exercise / "logs").mkdir(exist_ok=True)
    command = [*launcher(script, processes), "../bench/count_waits.py", "logs/waits"]
    found = losses(run([*command, path, *SMALL[exercise].split()], root / exercise))
    if not found:
        raise Failed("no loss was printed")
    row = {"loss": found[-1]}
    row |= json.loads((root / exercise / "logs/waits.0").read_text())
    if on_cpu is not None:
        expected = on_cpu.result()
        if len(found) != len(expected):
            raise Failed(f"{len(found)} losses, but {len(expected)} on a CPU")
        # The last one: the loss of one batch depends on dropout.
        far = abs(found[-1] - expected[-1]) / expected[-1]
        row["far_from_cpu"] = far
        if far > TOLERANCE and Path(script).stem not in HALVES:
            raise Failed(f"the last loss differs by {far:.0%} from the CPU's")
    if row["waits"] and Path(script).stem not in WAIT:
        raise Failed(f"each step waits for the GPU: {row['lines']}")
    return row


def kill_and_resume(root):
    """Kill a run after its first checkpoint; resume it, and compare the loss."""
    folder = root / "cinic_lab"
    command = [
        sys.executable,
        "cinic.py",
        *SMALL["cinic_lab"].split(),
        "--epochs",
        "4",
    ]
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


def check_up(root, script, processes, expected):
    command = [
        *TORCHRUN,
        f"--nproc-per-node={processes}",
        "checkup",
        "--strict",
        script,
    ]
    run(command, root / "clinic", expected=expected)


def measure(root, script, processes, *options):
    """Run a measurement of beyond_ddp/; return its output."""
    command = [*TORCHRUN, f"--nproc-per-node={processes}", f"beyond_ddp/{script}"]
    output = run([*command, *options], root / "dp_ddp_intro")
    return {"output": output.splitlines()}


def run_tests():
    if not importlib.util.find_spec("pytest"):
        raise Failed("no pytest; run `pip install pytest`")
    command = [sys.executable, "-m", "pytest", "-q", "--override-ini", "addopts="]
    run([*command, "-m", "gpu", "tests"], REPOSITORY, TEST_ON_GPUS="1")


def run_bench(exercise, data):
    return {"rows": list(measure_rows(exercise, data, True, repeats=3, seconds=0.5))}


class Table:
    """The tests so far; each row is saved as soon as it is known."""

    def __init__(self, file):
        self.file, self.rows = file, []

    def add(self, what, attempt, *args):
        """Add a row: the dict that attempt(*args) returns, or its error."""
        print(f"{what} ...", flush=True)
        start, row = time.perf_counter(), {"what": what, "result": "ok"}
        try:
            row |= attempt(*args) or {}
        except (Failed, subprocess.CalledProcessError, OSError, ValueError) as error:
            row["result"] = f"{error}"[:300]
            print(f"    {row['result']}", flush=True)
        row["seconds"] = round(time.perf_counter() - start, 1)
        self.rows.append(row)
        device = torch.accelerator.current_accelerator() or torch.device("cpu")
        about = {
            "torch": torch.__version__,
            "gpus": torch.accelerator.device_count(),
            "kind": device.type,
        }
        about |= {"date": time.strftime("%F"), "rows": self.rows}
        write(load(self.file) | {"test_gpu": about}, self.file)

    def print(self):
        """Print all rows; return the number of failures."""
        width = max(len(row["what"]) for row in self.rows)
        print(f"\n{'what':{width}}  seconds  result")
        for row in self.rows:
            print(f"{row['what']:{width}}  {row['seconds']:7.1f}  {row['result']}")
        return sum(row["result"] != "ok" for row in self.rows)


def list_scripts(processes, few):
    """Yield the training scripts of the pairs that can run here."""
    found = dict.fromkeys(script for pair in PAIRS for script in pair[:2])
    skipped = TWO if processes == 1 else []
    if not importlib.util.find_spec("wandb"):
        skipped = [*skipped, "cinic_wandb"]
    for script in found:
        name = Path(script).stem
        known = (
            script.partition("/")[0] in SMALL and "tensorflow_scripts/" not in script
        )
        if known and name not in skipped and (name in FEW or not few):
            yield script


def fill(table, root, few):
    """Run everything, or a part on CPU cores, in copies of the exercises."""
    processes = 2 if few else min(2, torch.accelerator.device_count())
    scripts = list(list_scripts(processes, few))
    gpu, cpu, on_cpu = root / "gpu", root / "cpu", {}
    if not few:
        table.add("check.py", lambda: {"found": run_check()})
    with ThreadPoolExecutor(max(1, os.cpu_count() // 4)) as pool:
        for script in scripts:
            if not few:
                on_cpu[script] = pool.submit(train_on_cpu, cpu, script, processes)
        for script in scripts:
            table.add(script, train, gpu, script, processes, on_cpu.get(script))
    table.add("a run that is killed and resumed", kill_and_resume, gpu)
    for number in (1,) if few else range(1, 12):
        patient = f"patient{number}.py"
        if processes == 2:  # the bugs need two processes
            sick = number != 5  # patient 5 needs two nodes
            table.add(f"checkup of {patient}", check_up, gpu, patient, 2, int(sick))
        healthy = f"solutions/{patient}"
        table.add(f"checkup of {healthy}", check_up, gpu, healthy, processes, 0)
    if processes == 2:
        table.add("measure_memory.py", measure, gpu, "measure_memory.py", 2)
        smaller = ["--width=64", "--length=32"] if few else []
        table.add(
            "measure_bubble.py", measure, gpu, "measure_bubble.py", 2, *smaller
        )
    if not few:
        table.add("tests that need a GPU", run_tests)
    for exercise in ["dp_ddp_intro"] if few else REQUIRED_FILES:
        table.add(f"bench of {exercise}", run_bench, exercise, root / "data")


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--cpu", action="store_true", help="run a part of it on two CPU cores"
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
            for exercise in (*SMALL, "clinic", "common", "bench"):
                shutil.copytree(
                    REPOSITORY / exercise,
                    root / name / exercise,
                    symlinks=True,
                    ignore=shutil.ignore_patterns("logs", "*.tar", "__pycache__"),
                )
        for exercise in SMALL.keys() - {"dp_ddp_intro"}:
            command = [sys.executable, "sample_data.py", "--to", root / "data"]
            run([*command, "--scale", "0.2"], REPOSITORY / exercise)
        os.environ |= {"DATADIR": str(root / "data"), "WANDB_MODE": "offline"}
        if not importlib.util.find_spec("line_profiler"):
            (root / "line_profiler.py").write_text(NO_PROFILER)
            os.environ["PYTHONPATH"] = folder
        fill(table, root, args.cpu)
    failed = table.print()
    print(f"\n{failed} of {len(table.rows)} failed. Please send {table.file}")
    sys.exit(failed > 0)


if __name__ == "__main__":
    run_main(main)
