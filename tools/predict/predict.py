"""Prediction of DDP's speed on many GPUs, from its speed on one or two.

    cd exercise8
    python ../tools/predict/predict.py logs/results.jsonl --check logs/check.json
    python ../tools/predict/predict.py logs/results.jsonl --site lumi --gpus 16
    python ../tools/predict/predict.py --site lumi --model vgg16 --batch-size 25
    python ../tools/predict/predict.py --site lumi --speed 119.6 --gradient-mb 440
    python ../tools/predict/predict.py --site lumi --model vgg16 --explain 8

The compute is taken from runs on one GPU, the sync overhead from a run on two GPUs
of a node, and the network from check.py, or from a site's data sheets and NCCL's
formulas (sites/). from-to: from the full network speed without sync overhead to half
the network speed with twice the overhead, or more with more GPUs. --explain prints
the arithmetic of one prediction. README.md explains the model.
"""

import argparse
import sys
from dataclasses import replace
from itertools import pairwise
from math import ceil, inf
from pathlib import Path
from typing import NamedTuple

import torch
from torch.utils.flop_counter import FlopCounterMode
from torchvision import models

from common.errors import UserError
from common.errors import run as run_main
from explain import explain_step
from links import load_json, load_site, make_links
from step_model import (
    SYNC_OVERHEAD,
    Step,
    Workload,
    best_and_worst,
    fit_compute,
    fit_sync_overhead,
    predict_step,
)

sys.path.append(str(Path(__file__).resolve().parent.parent))
from compare import MULTI_GPU, comparable_options, compare, name_row
from pairs import PAIRS
from results import read_runs, warn

DDP = {Path(right).stem for _, right, tag, _ in PAIRS if tag in ("DDP", "STRONG")}
DDP.remove("ddp_unfinished")  # each process trains on all data
IMAGENET = 1281167  # images
WORTH_IT = 0.75  # of the ideal gain: 1.5 times as fast by twice the GPUs


class Row(NamedTuple):
    """The prediction for a number of GPUs."""

    gpus: int
    nodes: int
    batch: int  # of all GPUs
    epoch_seconds: float
    step: Step
    best: Step
    worst: Step


def predict_rows(workload, links, images, max_gpus, global_batch=None):
    """Return a Row for each power of two up to max_gpus, and for max_gpus.

    images: per epoch; global_batch: the batch of all GPUs together, if it is fixed.
    """
    rows = []
    powers = [2**i for i in range(max_gpus.bit_length()) if 2**i < max_gpus]
    for n in [*powers, max_gpus]:
        if global_batch:
            workload = replace(workload, batch=ceil(global_batch / n))
        batch = global_batch or n * workload.batch
        if batch > images or (global_batch and n > global_batch):
            break  # less than one step per epoch, or less than one image per GPU
        step = predict_step(n, workload, links)
        best, worst = best_and_worst(n, workload, links)
        epoch_seconds = images / batch * step.seconds
        nodes = ceil(n / links.gpus_per_node)
        rows.append(Row(n, nodes, batch, epoch_seconds, step, best, worst))
    if not rows:
        raise UserError("an epoch is less than one batch; increase --images")
    return rows


def print_table(rows, unit, watts, on_gpus):
    """Print the rows. watts: per GPU, or None; CPU cores have no GPU hours."""
    header = f"GPUs nodes    batch step,ms         from-to {unit + '/s':>11} "
    header += "efficiency   epoch,s"
    if on_gpus:
        header += " GPU-hours     kWh"
    print(header)
    for row in rows:
        step = row.step.seconds * 1e3
        best, worst = row.best.seconds * 1e3, row.worst.seconds * 1e3
        speed = row.batch / row.step.seconds
        efficiency = speed / row.gpus / (rows[0].batch / rows[0].step.seconds)
        line = f"{row.gpus:4} {row.nodes:5} {row.batch:8} {step:7.4g} "
        line += f"{f'{best:.4g}-{worst:.4g}':>15} {speed:11,.0f} "
        line += f"{efficiency:10.0%} {row.epoch_seconds:9.4g}"
        if on_gpus:
            gpu_hours = row.gpus * row.epoch_seconds / 3600
            kwh = f"{gpu_hours * watts / 1e3:.3g}" if watts else "?"
            line += f" {gpu_hours:9.3g} {kwh:>7}"
        print(line)


def format_verdict(rows, workload, max_gpus):
    """Return how many GPUs are worth it, and the parts of a step there."""
    last = after = rows[-1]
    gain = 1
    for row, more in pairwise(rows):
        gain = row.epoch_seconds / more.epoch_seconds
        if gain < WORTH_IT * more.gpus / row.gpus:
            last, after = row, more
            break
    text = f"Worth it up to {last.gpus} GPU{'s' if last.gpus > 1 else ''}"
    if after is not last:
        text += f": {after.gpus} are {gain:.2f} times as fast"
    elif last.gpus < max_gpus:
        text += ": more GPUs would have no images"
    step, fixed_seconds = after.step, workload.fixed_seconds
    return (
        f"{text}.\nA step on {after.gpus}, in ms: compute {step.compute * 1e3:.2f} "
        f"({fixed_seconds * 1e3:.2f} of it fixed), sync overhead "
        f"{step.sync_overhead * 1e3:.2f}, network {step.network * 1e3:.2f}, "
        f"loading {step.loading * 1e3:.2f}."
    )


def step_seconds(run):
    """Return the seconds per step of a run, whose speed may be in tokens."""
    return run["batch"] * run["options"].get("length", 1) / run["speed"]


def measured_workload(files, images, links):
    """Return the newest runs' Workload, images per epoch, their unit, and rows.

    images: per epoch, or None to use those of the runs. The rows are those of
    compare() for one GPU and, if there is one, for two.
    """
    groups = compare(read_runs(files)).values()
    newest = max(groups, key=lambda runs: max(run["end"] for run in runs))
    newest = sorted(newest, key=lambda run: run["end"])
    on_one = [run for run in newest if run["gpus"] == 1]
    singles = [run for run in on_one if run["script"] not in MULTI_GPU]
    if not singles:
        raise UserError("no run on one GPU; run the script without DDP")
    base, on_two = singles[-1], None
    for run in newest:
        two = run["gpus"] == 2 and run["nodes"] == 1 and run["script"] in DDP
        if two and run["base"] and run["base"]["batch"] == run["batch_per_gpu"]:
            base, on_two = run["base"], run
    if not base.get("gradient_bytes"):
        raise UserError("no gradient_bytes in these runs; run a DDP script's pair")
    if base["options"].get("steps") and not images:
        raise UserError("these runs had --steps; add --images, those of an epoch")
    batch, seconds = base["batch"], {}
    for run in singles:
        same = comparable_options(run) == comparable_options(base)
        if run["script"] == base["script"] and same:
            seconds[run["batch"]] = step_seconds(run)
    seconds[batch] = step_seconds(base)
    workload = Workload(batch, base["gradient_bytes"], *fit_compute(seconds, batch))
    if on_two:
        two_gpu_seconds = step_seconds(on_two)
        workload.sync_overhead = fit_sync_overhead(two_gpu_seconds, workload, links)
    length = base["options"].get("length", 1)  # of a sequence, in tokens
    unit = "sequences" if length > 1 else base["unit"]
    images = images or base["size"] // length
    return workload, images, unit, [base, on_two] if on_two else [base]


def model_workload(name, batch, site, precision):
    """Return the Workload of a torchvision model, by the site's ResNet-50."""
    if name not in models.list_models(module=models):
        raise UserError(f"no {name} in torchvision.models; choose another --model")
    flops = []
    for model_name in "resnet50", name:
        with torch.device("meta"), FlopCounterMode(display=False) as counter:
            model = models.get_model(model_name).eval()
            model(torch.empty(1, 3, 224, 224))
        flops.append(counter.get_total_flops())
    gradient_bytes = sum(4 * p.numel() for p in model.parameters())
    seconds = flops[1] / flops[0] / site["resnet50"][precision]
    return Workload(batch, gradient_bytes, seconds)


def parse_options():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="*", metavar="RESULTS.jsonl", help="runs")
    parser.add_argument("--check", nargs="+", default=[], help="files of check.py")
    parser.add_argument("--site", help="name or file of a site")
    parser.add_argument("--model", help="torchvision model, without runs")
    parser.add_argument("--speed", type=float, help="images/s, without runs")
    parser.add_argument("--gradient-mb", type=float, help="MB, without runs")
    parser.add_argument("--batch-size", type=int, default=32, help="images per GPU")
    parser.add_argument("--amp", action="store_true", help="16 bits, for --model")
    parser.add_argument("--images", type=int, help="images per epoch")
    parser.add_argument("--global-batch-size", type=int, help="for strong scaling")
    parser.add_argument("--loader-rate", type=int, help="images/s of a GPU's loader")
    parser.add_argument("--gpus", type=int, default=1024, help="most GPUs")
    parser.add_argument("--explain", type=int, metavar="GPUS", help="arithmetic")
    args = parser.parse_args()
    if not args.site and not args.check:
        raise UserError("no network; add --check FILE or --site NAME")
    if args.files or (args.speed and args.gradient_mb) or (args.model and args.site):
        return args
    raise UserError("no runs; add a file, --model, or --speed and --gradient-mb")


def main():
    args = parse_options()
    site = load_site(args.site) if args.site else {}
    checks = [load_json(file, "all_reduce") for file in args.check]
    links = make_links(site, checks)
    max_gpus = args.gpus
    if "between" not in links.bandwidth and max_gpus > links.gpus_per_node:
        print("No links between nodes are known; add a --check of two nodes\n")
        max_gpus = links.gpus_per_node
    images, unit, runs = args.images or IMAGENET, "images", []
    if args.files:
        found = measured_workload(args.files, args.images, links)
        workload, images, unit, runs = found
    elif args.speed and args.gradient_mb:
        workload = Workload(args.batch_size, args.gradient_mb * 1e6, 1 / args.speed)
    else:
        if "resnet50" not in site:
            text = "no speed of ResNet-50 in this site"
            raise UserError(f"{text}; add --speed and --gradient-mb, not --model")
        precision = "fp16" if args.amp else "fp32"
        workload = model_workload(args.model, args.batch_size, site, precision)
    workload.loader_rate = args.loader_rate or inf
    global_batch = args.global_batch_size or workload.batch
    tables = {
        f"Weak scaling, {workload.batch} per GPU: more GPUs, a larger batch": None,
        f"Strong scaling, {global_batch} in total: the batch stays": global_batch,
    }
    watts = site.get("watts", {}).get("per_gpu")
    on_gpus = not (runs and runs[0]["processor"].startswith("CPU core"))
    for run in runs:
        print(f"From {name_row(run)}, batch {run['batch']}")
        for note in run["notes"]:
            warn(note)
    if not on_gpus:
        warn("this predicts more CPU cores like those of the runs, not GPUs")
    for title, shared in tables.items():
        rows = predict_rows(workload, links, images, max_gpus, shared)
        print(title)
        print_table(rows, unit, watts, on_gpus)
        print(format_verdict(rows, workload, max_gpus), end="\n\n")
    if args.explain:
        gpus = min(args.explain, max_gpus)
        print(*explain_step(gpus, workload, links, site), sep="\n", end="\n\n")
    if len(runs) < 2:
        print(f"This assumes a sync overhead of {SYNC_OVERHEAD:.0%} of the compute.")
        print("Measure it by a run of the DDP script on two GPUs of a node.")
    if not args.loader_rate:
        rate = workload.batch / workload.batch_seconds
        print(f"This assumes that each process loads {rate:,.0f} {unit}/s.")
        print("Measure it and add --loader-rate: README.md, The loader.")


if __name__ == "__main__":
    run_main(main)
