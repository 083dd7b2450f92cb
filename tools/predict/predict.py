"""Prediction of DDP's speed on many GPUs, from its speed on one or two.

    cd exercise8
    python ../tools/predict/predict.py logs/results.jsonl --check logs/check.json
    python ../tools/predict/predict.py logs/results.jsonl --site lumi --gpus 16
    python ../tools/predict/predict.py --site lumi --model vgg16 --batch-size 25
    python ../tools/predict/predict.py --site lumi --speed 119.6 --gradient-mb 440

The compute is taken from runs on one GPU, else on the fewest, the sync overhead from
a run on two GPUs of a node, and the network from check.py, or from a site's data
sheets and NCCL's formulas (sites/). README.md explains the model.
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

from common.errors import UserError, positive
from common.errors import run as run_main
from links import load_json, load_site, make_links
from step_model import Step, Workload, best_and_worst, fit, fit_compute, predict_step

sys.path.append(str(Path(__file__).resolve().parent.parent))
from compare import comparable_options, compare, is_multi_gpu, name_row, print_table
from pairs import PAIRS
from prediction_plot import draw_predictions
from results import leave_out, read_runs, warn

IMAGENET = 1281167  # images
WORTH_IT = 0.75  # of the ideal gain: twice the GPUs must give 1.5 times the speed
HOST_BOUND = 2  # times as long as the arithmetic takes at ResNet-50's FLOP/s


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
        raise UserError(
            "an epoch has less than one batch: run with a smaller --batch-size"
        )
    return rows


def print_rows(rows, unit, watts, on_gpus):
    """Print a table. watts: per GPU, or None; CPU cores have no GPU hours."""
    header = f"GPUs nodes batch step,ms from-to {unit}/s efficiency epoch,s".split()
    lines = [header + ["GPU-hours", "kWh"] * on_gpus]
    for row in rows:
        step, best, worst = (
            1e3 * s.seconds for s in (row.step, row.best, row.worst)
        )
        speed = row.batch / row.step.seconds
        efficiency = speed / row.gpus / (rows[0].batch / rows[0].step.seconds)
        line = [str(row.gpus), str(row.nodes), str(row.batch), f"{step:.4g}"]
        line += [f"{best:.4g}-{worst:.4g}", f"{speed:,.0f}", f"{efficiency:.0%}"]
        line.append(f"{row.epoch_seconds:.4g}")
        if on_gpus:
            gpu_hours = row.gpus * row.epoch_seconds / 3600
            kwh = f"{gpu_hours * watts / 1e3:.3g}" if watts else "?"
            line += [f"{gpu_hours:.3g}", kwh]
        lines.append(line)
    print_table(lines, [])


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


def is_ddp(script):
    """Return whether a script's pair is about DDP and nothing else."""
    if script == "ddp_unfinished":  # each process trains on all data
        return False
    tags = {tag for _, right, tag, *_ in PAIRS if Path(right).stem == script}
    return bool(tags & {"DDP", "STRONG"})


def shares_gpus(run):
    return run["gpus_shared"]


def step_seconds(run):
    """Return the seconds per step of a run, whose speed may be in tokens."""
    return run["batch"] * run["options"].get("length", 1) / run["speed"]


def measured_workload(files, links):
    """Return the newest runs' Workload, images per epoch, unit, speed-ups, and runs.

    Speed-ups are all that were measured: [(baseline's batch, GPUs, speed-up)]. The
    runs are compare()'s on the fewest GPUs and, if those are one, on two.
    """
    runs = leave_out(read_runs(files), "whose ranks share a GPU", shares_gpus)
    groups = compare(runs).values()
    if not groups:
        raise UserError(
            "no run with a GPU for each rank; run the script without DDP"
        )
    newest = max(groups, key=lambda runs: max(run["end"] for run in runs))
    newest = sorted(newest, key=lambda run: run["end"])
    single = [r for r in newest if r["gpus"] == 1 and not is_multi_gpu(r["script"])]
    several = [run for run in newest if run["gpus"] > 1 and is_ddp(run["script"])]
    if not single + several:
        raise UserError("no run on one GPU; run the script without DDP")
    fewest = min(run["gpus"] for run in single or several)
    base = [run for run in single or several if run["gpus"] == fewest][-1]
    on_two = None
    for run in several:
        alike = run["base"] and run["base"]["batch"] == run["batch_per_gpu"]
        if run["gpus"] == 2 and run["nodes"] == 1 and alike:
            base, on_two = run["base"], run
    if not base.get("gradient_bytes"):
        raise UserError("no gradient_bytes in these runs; run a DDP script's pair")
    if base["options"].get("steps"):
        raise UserError("these runs had --steps; run the script without it")
    batch = base["batch_per_gpu"]
    workload = Workload(batch, base["gradient_bytes"], 0)
    if single:
        alike = [r for r in single if r["script"] == base["script"]]
        options = comparable_options(base)
        alike = [r for r in alike if comparable_options(r) == options]
        seconds = {run["batch"]: step_seconds(run) for run in [*alike, base]}
        workload = Workload(
            batch, base["gradient_bytes"], *fit_compute(seconds, batch)
        )
    else:
        nodes = replace(links, gpus_per_node=base["gpus"] // base["nodes"])
        seconds = step_seconds(base)
        workload = fit("sample_seconds", seconds, base["gpus"], workload, nodes)
    if on_two:
        workload = fit("sync_overhead", step_seconds(on_two), 2, workload, links)
    length = base["options"].get("length", 1)  # of a sequence, in tokens
    unit = "sequences" if length > 1 else base["unit"]
    images = base["size"] // length
    speedups = [
        (r["base_batch"], r["gpus"], r["speedup"]) for r in several if r["base"]
    ]
    return workload, images, unit, speedups, [base, on_two] if on_two else [base]


def count_flop(name):
    """Return a torchvision model's FLOPs of a forward pass, and its parameters."""
    if name not in models.list_models(module=models):
        raise UserError(f"no {name} in torchvision.models; choose another --model")
    with torch.device("meta"), FlopCounterMode(display=False) as counter:
        model = models.get_model(name).eval()
        model(torch.empty(1, 3, 224, 224))
    return counter.get_total_flops(), sum(p.numel() for p in model.parameters())


def arithmetic_seconds(flop, site):
    """Return the seconds for an image of this many FLOPs, at ResNet-50's FLOP/s."""
    if "resnet50" not in site:
        text = "no speed of ResNet-50 in this site"
        raise UserError(f"{text}; add --speed and --gradient-mb, not --model")
    return flop / count_flop("resnet50")[0] / site["resnet50"]["fp32"]


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
    parser.add_argument(
        "--batch-size", type=positive, default=32, help="images per GPU"
    )
    parser.add_argument("--loader-rate", type=positive, help="images/s of a loader")
    parser.add_argument("--gpus", type=positive, default=1024, help="most GPUs")
    parser.add_argument("--plot", type=Path, metavar="PNG", help="plot to write")
    args = parser.parse_args()
    if not args.site and not args.check:
        raise UserError("no network; add --check FILE or --site NAME")
    speed = args.speed and (args.gradient_mb or args.model)
    if args.files or speed or (args.model and args.site):
        return args
    raise UserError("no runs; add a file, --model, or --speed and --gradient-mb")


def make_workload(args, site):
    """Return the Workload of --speed or --model."""
    flop, parameters = count_flop(args.model) if args.model else (0, 0)
    gradient_bytes = args.gradient_mb * 1e6 if args.gradient_mb else 4 * parameters
    seconds = 1 / args.speed if args.speed else arithmetic_seconds(flop, site)
    return Workload(args.batch_size, gradient_bytes, seconds)


def warn_if_host_bound(args, workload, site):
    """Warn if a step takes much longer than its arithmetic."""
    if not ((args.files or args.speed) and args.model and "resnet50" in site):
        return
    seconds = arithmetic_seconds(count_flop(args.model)[0], site)
    ratio = workload.batch_seconds / workload.batch / seconds
    if ratio > HOST_BOUND:
        text = f"a step takes {ratio:.1f} times as long as at ResNet-50's FLOP/s"
        warn(f"{text}; if the host or the loader limits it, more GPUs will not help")


def print_sources(args, runs, links, site, workload, unit):
    """Print which numbers were measured, are of data sheets, or are assumed."""
    measured = [f"the speed on {run['gpus']}" for run in runs[:1]]
    measured += ["--speed"] * (not runs and bool(args.speed))
    assumed = [] if measured else ["the FLOP/s of ResNet-50, which the site has"]
    measured += ["the sync overhead on two GPUs"] * (len(runs) > 1)
    measured += [f"all-reduces {where} nodes" for where in links.checks]
    print(f"Measured: {', '.join(measured) or 'nothing'}.")
    sheets = sorted({"inside", "between"} & site.keys() - links.checks.keys())
    sheets = [f"links {where} nodes" for where in sheets]
    print(f"From data sheets: {', '.join(sheets) or 'nothing'}.")
    rate = workload.batch / workload.batch_seconds
    loaders = f"loaders with {rate:,.0f} {unit}/s per GPU: see --loader-rate"
    overhead = "the sync overhead: run the DDP script on two GPUs of a node"
    assumed += [overhead] * (len(runs) < 2) + [loaders] * (not args.loader_rate)
    assumed.append("PyTorch DDP: others were often slower on several nodes")
    print("Assumed:", *assumed, sep="\n  ")


def main():
    args = parse_options()
    site = load_site(args.site) if args.site else {}
    checks = [load_json(file, "all_reduce") for file in args.check]
    for file, check in zip(args.check, checks, strict=True):
        if check.get("gpus_shared"):
            text = f"in {file} several ranks shared a GPU"
            raise UserError(f"{text}; run check.py with one process per GPU")
    links = make_links(site, checks)
    max_gpus = args.gpus
    if "between" not in links.bandwidth and max_gpus > links.gpus_per_node:
        print("No links between nodes are known; add a --check of two nodes\n")
        max_gpus = links.gpus_per_node
    images, unit, speedups, runs = IMAGENET, "images", [], []
    if args.files:
        found = measured_workload(args.files, links)
        workload, images, unit, speedups, runs = found
    else:
        workload = make_workload(args, site)
    workload.loader_rate = args.loader_rate or inf
    batch = workload.batch
    tables = {
        f"Weak scaling, {batch} per GPU: if you keep --batch-size": None,
        f"Strong scaling, {batch} in total: if you divide it": batch,
    }
    watts = site.get("watts", {}).get("per_gpu")
    on_gpus = not (runs and runs[0]["processor"].startswith("CPU core"))
    for run in runs:
        print(f"From {name_row(run)}, batch {run['batch']}")
        for note in run["notes"]:
            warn(note)
    if not on_gpus:
        warn("this predicts more CPU cores like those of the runs, not GPUs")
    warn_if_host_bound(args, workload, site)
    plotted = {}
    for title, shared in tables.items():
        rows = predict_rows(workload, links, images, max_gpus, shared)
        print(title)
        print_rows(rows, unit, watts, on_gpus)
        print(format_verdict(rows, workload, max_gpus), end="\n\n")
        kind = f"{batch} in total" if shared else f"{batch} per GPU"
        plotted[title] = rows, [(n, s) for base, n, s in speedups if base == kind]
    print_sources(args, runs, links, site, workload, unit)
    if args.plot:
        args.plot.parent.mkdir(parents=True, exist_ok=True)
        draw_predictions(plotted).savefig(args.plot, dpi=110)
        print(f"Plot saved to {args.plot}")


if __name__ == "__main__":
    run_main(main)
