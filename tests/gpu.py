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
import json
import os
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from tempfile import TemporaryDirectory

import gpu_losses
import torch
from gpu_jobs import RANKS, end_all_jobs, server
from gpu_rows import SCALE, SMALL, SMALL_SCALE, list_rows, make_data, run, train

from bench import load, result_file, write
from common.data import REPOSITORY
from common.errors import UserError
from common.errors import run as run_main

HIDE = {"CUDA_VISIBLE_DEVICES": "-1", "HIP_VISIBLE_DEVICES": "-1"}


class Table:
    """The rows of this run; each is saved as soon as it is known."""

    def __init__(self, file):
        self.file, self.rows, self.saving = file, [], threading.Lock()
        self.about = {"torch": torch.__version__, "date": time.strftime("%F")}
        self.about["gpus"] = torch.accelerator.device_count()

    def add(self, name, function, *args):
        """Add a row: the dict that function(*args) returns, or its error."""
        start, row = time.perf_counter(), {"what": name, "result": "ok"}
        try:
            row |= function(*args) or {}
        except Exception as error:  # whatever it is, the rest continues
            row["result"] = f"{error}"[:300]
        row["seconds"] = round(time.perf_counter() - start, 1)
        self.save(row)

    def skip(self, name, reason):
        self.save({"what": name, "result": "ok", "note": reason, "seconds": 0.0})

    def save(self, row):
        with self.saving:
            print(format_row(row, len(row["what"])), flush=True)
            self.rows.append(row | self.about)
            saved = load(self.file)
            rows = saved.get("test_gpu", {}).get("rows", [])
            rows = [earlier for earlier in rows if earlier["what"] != row["what"]]
            write(saved | {"test_gpu": {"rows": rows + self.rows[-1:]}}, self.file)

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
    if torch.cuda.is_available() and torch.cuda.nccl.version() < (2, 30):
        version = ".".join(map(str, torch.cuda.nccl.version()))
        return f"skipped: NCCL {version} cannot share a GPU; PyTorch 2.14 has 2.30"
    return None


def run_rows(table, rows):
    """Run the rows: those that may run side by side first, then the others."""
    reason = explain_no_sharing()
    for row in rows:
        if reason and row.ranks == 2:
            table.skip(row.name, reason)
    rows = [row for row in rows if not (reason and row.ranks == 2)]
    first = [row for row in rows[:1] if row.alone]  # check.py
    for row in first:
        table.add(*row[:2], *row.args)
    together = [row for row in rows if not row.alone]
    pool = ThreadPoolExecutor(RANKS)
    try:
        jobs = [pool.submit(table.add, *row[:2], *row.args) for row in together]
        for job in as_completed(jobs):
            job.result()
        for row in rows[len(first) :]:
            if row.alone:
                table.add(*row[:2], *row.args)
    finally:  # also after Ctrl-C
        pool.shutdown(wait=False, cancel_futures=True)
        end_all_jobs()


def record_losses(rows, file, seed):
    """Train on CPU cores, and write the losses that a GPU is compared with."""
    rows = [row for row in rows if row.function is train]
    with ThreadPoolExecutor(RANKS) as pool:
        jobs = {r.name: pool.submit(train, *r.args, compared=False) for r in rows}
    failed = {name: job.exception() for name, job in jobs.items() if job.exception()}
    for name, error in failed.items():
        print(f"{name}: {error}")
    rows = {name: job.result() for name, job in jobs.items() if name not in failed}
    losses = {name: gpu_losses.shorten(row) for name, row in rows.items()}
    saved = gpu_losses.load(file)
    if saved.get("seed") == seed:  # of other scripts
        losses = saved["losses"] | losses
    cpu = torch.cpu.get_capabilities().get("cpu_name")
    about = {"torch": torch.__version__, "cpu": cpu, "date": time.strftime("%F")}
    about |= {"seed": seed, "losses": dict(sorted(losses.items()))}
    file.write_text(json.dumps(about, indent=1) + "\n")
    print(f"Saved the losses of {len(rows)} scripts in {file}")
    sys.exit(bool(failed))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cpu", action="store_true", help="a part on two CPU cores")
    parser.add_argument("--only", action="append", help="word of the rows to run")
    parser.add_argument(
        "--record", action="store_true", help="record a CPU's losses"
    )
    parser.add_argument("--seed", type=int, default=0, help="random seed")
    parser.add_argument(
        "--losses", type=Path, default=gpu_losses.FILE, help="file of a CPU's losses"
    )
    args = parser.parse_args()
    if args.cpu or args.record:
        os.environ |= HIDE
    elif not torch.accelerator.device_count():
        raise UserError("PyTorch finds no GPU; type `make test-gpu GPU=--cpu`")
    os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"  # for two ranks on one GPU
    table = Table(
        Path("logs/test_gpu.json").resolve() if args.cpu else result_file()
    )
    table.file.parent.mkdir(exist_ok=True)
    saved = gpu_losses.load(args.losses)
    if not args.record and saved.get("seed") != args.seed:
        raise UserError(f"{args.losses} has no losses of seed {args.seed}: --record")
    with TemporaryDirectory() as folder:
        root = Path(folder)
        results = table.file.with_suffix("")  # the folder beside the file
        options = args.cpu, args.seed, saved.get("losses", {})
        rows = list(list_rows(root, results, *options))
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
            record_losses(chosen, args.losses, args.seed)
        run_rows(table, chosen)
    failed = table.print()
    print(f"\n{failed} of {len(table.rows)} failed. Please send {table.file}")
    print(f"and the files in {results}")
    sys.exit(failed > 0)


if __name__ == "__main__":
    run_main(main)
