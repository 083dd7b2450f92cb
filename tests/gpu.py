"""Tests of everything that needs a GPU, with one file of results to send.

    make test-gpu                  all rows, on one GPU or several
    make test-gpu GPU="--only ResNet --only mnist"    rows with one of these words
    make test-gpu GPU=--cpu        a part of it on two CPU cores: three minutes
    make test-gpu GPU=--record     write tests/losses.json anew, on CPU cores

Runs check.py; each training script for a few steps, DDP's on two ranks; the
checkup; a run that is killed and resumed; then, alone, what measures speeds. On one
GPU, both ranks share it, by NCCL 2.30 or later. gpu_rows.py has the rows.

The losses must be those of a CPU, and no step may wait for the GPU. A row that fails
or hangs does not stop the rest. Each row is saved at once in bench/results, in place
of the same row of an earlier run; a table follows at the end.
Exit status: 1 if something failed, 2 without a GPU.
"""

import argparse
import os
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import active_children
from pathlib import Path
from tempfile import TemporaryDirectory

import gpu_losses
import torch
from fork_ranks import server
from gpu_jobs import Failed
from gpu_rows import SCALE, SMALL, SMALL_SCALE, list_rows, make_data, run, train

from bench import load, result_file, write
from common.data import REPOSITORY
from common.errors import UserError
from common.errors import run as run_main

HIDE = {"CUDA_VISIBLE_DEVICES": "-1", "HIP_VISIBLE_DEVICES": "-1"}
RANKS = 8  # at a time


class Table:
    """The rows of this run; each is saved as soon as it is known."""

    def __init__(self, file):
        self.file, self.rows, self.saving = file, [], threading.Lock()
        self.about = {"torch": torch.__version__, "date": time.strftime("%F")}
        self.about["gpus"] = torch.accelerator.device_count()

    def add(self, row):
        """Run a row of gpu_rows.py; save the dict that it returns, or its error."""
        start, result = time.perf_counter(), {"what": row.name}
        try:
            result |= row.function(*row.args) or {}
        except Exception as error:  # whatever it is, the rest continues
            result |= getattr(error, "row", {}) | {"result": f"{error}"[:300]}
        self.save(result | {"seconds": round(time.perf_counter() - start, 1)})

    def save(self, row):
        row = {"result": "ok", "seconds": 0.0} | row | self.about
        with self.saving:
            print(format_row(row, len(row["what"])), flush=True)
            self.rows.append(row)
            saved = load(self.file)
            rows = saved.get("test_gpu", {}).get("rows", [])
            rows = [earlier for earlier in rows if earlier["what"] != row["what"]]
            write(saved | {"test_gpu": {"rows": [*rows, row]}}, self.file)

    def print(self):
        """Print the rows of this run; return the number of failures."""
        width = max(len(row["what"]) for row in self.rows)
        print(f"\n{'what':{width}}  seconds  result")
        for row in self.rows:
            print(format_row(row, width))
        return sum(row["result"] != "ok" for row in self.rows)


def format_row(row, width):
    line = f"{row['what']:{width}}  {row['seconds']:7.1f}  {row['result']}"
    return f"{line} ({row['note']})" if "note" in row else line


def explain_no_sharing():
    """Return why two ranks cannot share this machine's one GPU, or None."""
    if torch.accelerator.device_count() != 1:
        return None
    if torch.version.hip:
        return "skipped: nobody has tried whether RCCL lets ranks share a GPU"
    version = torch.cuda.nccl.version()
    if version < (2, 30):
        return f"skipped: NCCL {'.'.join(map(str, version))} cannot share a GPU"
    return None


def run_rows(table, rows):
    """Run check.py, then the rows that may run side by side, then the others."""
    reason = explain_no_sharing()
    if reason:
        for row in rows:
            if row.ranks == 2:
                table.save({"what": row.name, "note": reason})
        rows = [row for row in rows if row.ranks == 1]
    for row in rows:
        if row.name == "check.py":
            table.add(row)
    for ranks in 1, 2:
        pool = ThreadPoolExecutor(RANKS // ranks)
        try:
            together = [row for row in rows if row.ranks == ranks and not row.alone]
            list(pool.map(table.add, together))
        finally:  # also after Ctrl-C
            pool.shutdown(wait=False, cancel_futures=True)
            for process in active_children():
                process.kill()
    for row in rows:
        if row.alone and row.name != "check.py":
            table.add(row)


def record_losses(rows):
    """Train on CPU cores, and save the losses that a GPU is compared with."""
    recorded, failed = {}, []

    def train_row(row):
        try:
            recorded[row.name] = train(*row.args, compared=False)
        except Failed as error:
            failed.append(f"{row.name}: {error}")

    with ThreadPoolExecutor(RANKS // 2) as pool:
        list(pool.map(train_row, [row for row in rows if row.function is train]))
    gpu_losses.save(recorded)
    print(*failed, f"Saved the losses of {len(recorded)} scripts", sep="\n")
    sys.exit(bool(failed))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cpu", action="store_true", help="a part on two CPU cores")
    parser.add_argument("--only", action="append", help="word of the rows to run")
    parser.add_argument(
        "--record", action="store_true", help="record a CPU's losses"
    )
    args = parser.parse_args()
    if args.cpu or args.record:
        os.environ |= HIDE
    elif not torch.accelerator.device_count():
        raise UserError("PyTorch finds no GPU; type `make test-gpu GPU=--cpu`")
    os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"  # for two ranks on one GPU
    # To ask whether there is a GPU must not open it before processes are forked.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    on_cpu = args.cpu or args.record
    table = Table(Path("logs/test_gpu.json").resolve() if on_cpu else result_file())
    results = table.file.with_suffix("")  # the folder beside the file
    results.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory() as folder:
        root = Path(folder)
        rows = list(list_rows(root, results, args.cpu, gpu_losses.load()))
        words = args.only or [""]
        chosen = [row for row in rows if any(word in row.name for word in words)]
        if not chosen:
            raise UserError(f"no row with {' or '.join(words)} in its name")
        os.environ |= {"DATADIR": str(root / "data"), "WANDB_MODE": "offline"}
        for exercise in SMALL.keys() - {"dp_ddp_intro", "beyond_ddp"}:
            make_data(exercise, root / "data", SCALE.get(exercise, SMALL_SCALE))
        shards = sys.executable, "write_shards.py", "--tokens=1024"
        run(shards, REPOSITORY / "beyond_ddp")
        server()
        if args.record:
            record_losses(chosen)
        run_rows(table, chosen)
    failed = table.print()
    print(f"\n{failed} of {len(table.rows)} failed. Please send {table.file}")
    print(f"and the files in {results}")
    sys.exit(failed > 0)


if __name__ == "__main__":
    run_main(main)
