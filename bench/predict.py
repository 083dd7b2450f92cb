"""Is a second node worth it? Predicts DDP on many GPUs from its speed on one or two.

    cd exercise8
    python ../bench/predict.py logs/results.jsonl --check logs/check-4711.json
    python ../bench/predict.py logs/results.jsonl --site lumi --explain 16
    python ../bench/predict.py --site lumi --model vgg16 --batch-size 25
    python ../bench/predict.py --site lumi --speed 119.6 --gradients 440

What one GPU does comes from runs on one GPU, and what it costs to be in a group from
a run on two of a node; how fast GPUs talk from what check.py measured, or from a
site's data sheets and NCCL's formulas (bench/sites/). from-to: a network at its peak
and a group that costs nothing; half the network, and a group that costs twice as
much, or more the more GPUs wait for the slowest. bench/README.md explains all.
"""

import signal
from itertools import pairwise
from math import ceil
from pathlib import Path

import torch
from compare import MANY, compare, fixed, read_runs, save
from scaling import (
    GROUP,
    explain,
    extremes,
    group_seconds,
    read,
    read_net,
    read_site,
    step,
    work,
)
from torch.utils.flop_counter import FlopCounterMode
from torchvision import models

from common.cli import OptionParser, UserError, at_least
from pairs import PAIRS

DDP = {Path(right).stem for _, right, tag, _ in PAIRS if tag in ("DDP", "STRONG")}


def rows(case, net, most, whole=None):
    """Return a row for each number of GPUs; whole: the batch that they share."""
    found = []
    numbers = [2**i for i in range(most.bit_length()) if 2**i < most]
    for n in [*numbers, most]:
        batch = ceil(whole / n) if whole else case["batch"]
        total = (whole or n * batch) * case["accumulate"]
        if total > case["images"] or n > (whole or n):
            break  # less than one step an epoch, or than one image a GPU
        ways = (1, 1), *extremes(n, bool(net["measured"]))
        parts, *ends = (step(n, batch, case, net, *way)[0] for way in ways)
        row = {"n": n, "nodes": ceil(n / net["gpus_per_node"]), "batch": total}
        row |= {"step": sum(parts.values()), "ends": [sum(p.values()) for p in ends]}
        row["epoch"] = case["images"] / total * row["step"]
        if whole:  # what any batch costs, however small it is
            parts["batch"] = case["fixed"] * case["accumulate"] * (n > 1)
        row["gain"] = found[-1]["epoch"] / row["epoch"] if found else 1
        found.append(row | {"speed": total / row["step"], "parts": parts})
    if not found:
        raise UserError("an epoch is less than one batch: type more --images")
    return found


def table(found, counts, watts):
    """Return the lines of a table, a row for each number of GPUs."""
    head = f"GPUs nodes batch step,ms from-to {counts}/s efficiency epoch,s"
    lines = [[*head.split(), "GPU-hours", "kWh"]]
    for row in found:
        n, hours = row["n"], row["n"] * row["epoch"] / 3600
        share = row["speed"] / n / found[0]["speed"]
        cells = [n, row["nodes"], row["batch"], f"{row['step'] * 1e3:.4g}"]
        cells += ["-".join(f"{s * 1e3:.4g}" for s in row["ends"])]
        cells += [f"{row['speed']:,.0f}", f"{share:.0%}", f"{row['epoch']:.4g}"]
        cells += [f"{hours:.3g}", f"{hours * watts / 1e3:.3g}" if watts else "?"]
        lines.append([*map(str, cells)])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return ["  ".join(map(str.rjust, line, widths)) for line in lines]


def verdict(found, most):
    """Say up to where more GPUs are worth it, and what costs most there."""
    doublings = pairwise(found)  # but the last of an odd number
    slow = ((a, b) for a, b in doublings if b["gain"] < 0.75 * b["n"] / a["n"])
    row, more = next(slow, (found[-1], found[-1]))
    text = f"Worth it up to {row['n']} GPU{'s' * (row['n'] > 1)}"
    if row is not more:
        text += f": {more['n']} are {more['gain']:.2f} times as fast"
    elif row["n"] < most:
        text = f"{text}: there are no images for more"
    names = {"group": "being in a group", "network": "the network"}
    names |= {
        "loader": "loading",
        "batch": "what a batch costs, however small it is",
    }
    lost = {name: more["parts"].get(name, 0) / more["step"] for name in names}
    most_lost = max(lost, key=lost.get)
    why = f". {lost[most_lost]:.0%} of a step there: {names[most_lost]}"
    return text + why * (more["n"] > 1)


def draw(kinds, counts, file):
    """Save a PNG of the speed over the GPUs, a line for each kind of scaling."""
    from matplotlib.figure import Figure

    axes = Figure(figsize=(7, 5)).add_subplot(xscale="log", yscale="log")
    for kind, found in kinds.items():
        x = [row["n"] for row in found]
        (line,) = axes.plot(x, [row["speed"] for row in found], "o-", label=kind)
        ends = [[row["batch"] / row["ends"][end] for row in found] for end in (0, 1)]
        axes.fill_between(x, *ends, alpha=0.2, color=line.get_color())
        axes.plot(x, [n * found[0]["speed"] for n in x], ":", color="gray")
    longest = max(kinds.values(), key=len)
    x, y = ([row[key] for row in longest] for key in ("n", "speed"))
    axes.set_xticks(x, x)
    axes.set_yticks(y, [f"{speed:,.0f}" for speed in y])
    axes.minorticks_off()
    axes.set(xlabel="GPUs", ylabel=f"{counts}/s (dotted: if nothing were lost)")
    axes.legend()
    save(axes.figure, file)


def step_seconds(run):
    """Return the seconds of a step of a run, whose speed may count tokens."""
    return run["batch"] * run["options"].get("length", 1) / run["speed"]


def measured_case(files, images):
    """Return step()'s case of the newest runs, and seconds of a step on two GPUs.

    images: of an epoch, or None: as the runs had.
    """
    groups = compare(read_runs(files)).values()
    found = max(groups, key=lambda rows: max(row["end"] for row in rows))
    found = sorted(found, key=lambda row: row["end"])
    ones = [r for r in found if r["gpus"] == 1 and r["script"] not in MANY]
    twos = [r for r in found if r["gpus"] == 2 > r["nodes"] and r["script"] in DDP]
    twos = [
        r for r in twos if r["base"] and r["base"]["batch"] == r["batch_per_gpu"]
    ]
    if not ones:
        raise UserError("no run on one GPU there: start the script that has no DDP")
    one = twos[-1]["base"] if twos else ones[-1]
    if not one.get("gradient_bytes"):
        raise UserError("these runs did not count their gradients: start them again")
    if one["options"].get("steps") and not images:
        raise UserError(
            "these runs had --steps: type how many --images an epoch has"
        )
    alike = [
        r for r in ones if (r["script"], fixed(r)) == (one["script"], fixed(one))
    ]
    seconds = {row["batch"]: step_seconds(row) for row in [*alike, one]}
    length = one["options"].get("length", 1)  # of a sequence, in tokens
    case = {"batch": one["batch"], "images": images or one["size"] // length}
    case["counts"] = "sequences" if length > 1 else one["counts"]
    case |= {"gradients": one["gradient_bytes"], **work(seconds, one["batch"])}
    return case, twos and step_seconds(twos[-1])


def model_case(name, site, precision):
    """Return what step()'s case has of a net, by the site's ResNet-50."""
    if name not in models.list_models(module=models):
        raise UserError(f"torchvision.models has no {name}: type another --model")
    counts = []
    for net in "resnet50", name:
        with torch.device("meta"), FlopCounterMode(display=False) as counter:
            model = models.get_model(net).eval()
            model(torch.empty(1, 3, 224, 224))
        counts.append(counter.get_total_flops())
    gradients = sum(4 * p.numel() for p in model.parameters())
    each = counts[1] / counts[0] / site["resnet50"][precision]
    return {"each": each, "gradients": gradients}


def main():
    parser = OptionParser(__doc__)
    add, some = parser.add_argument, at_least(1)
    add("files", nargs="*", metavar="RESULTS.jsonl", help="of runs; default: none")
    text = "of check.py; default: none"
    add("--check", nargs="+", default=[], metavar="JSON", help=text)
    add("--site", help="of bench/sites/, or a file like those; default: none")
    add("--model", help="of torchvision, if nothing was measured; default: none")
    add("--speed", type=float, help="or images/s of one GPU; default: none")
    add("--gradients", type=float, metavar="MB", help="with --speed; default: none")
    add("--batch-size", type=some, default=32, help="of a GPU, for these")
    add("--amp", action="store_true", help="with autocast, for --model")
    add("--images", type=some, help="of an epoch; default: measured, or ImageNet's")
    add("--whole", type=some, help="batch for strong scaling; default: of one GPU")
    add("--accumulate", type=some, default=1, help="batches for one all-reduce")
    add("--loader", type=some, default=10**9, help="images/s that a GPU's gives")
    add("--storage", type=some, default=10**9, help="images/s that all can read")
    add("--gpus", type=some, default=1024, help="the most")
    add("--explain", type=some, metavar="N", help="for N GPUs; default: none")
    add("--plot", default="logs/predict.png", help="PNG to write")
    args, site, two = parser.parse_args(), {}, None
    if not args.site and not args.check:
        raise UserError("what network is it: type --check FILE, or --site NAME")
    told = args.speed and args.gradients
    if not (args.files or told or (args.model and args.site)):
        text = "what runs: type RESULTS.jsonl, --model, or --speed and --gradients"
        raise UserError(text)
    if args.site:
        site = read_site(args.site, *["resnet50"] * bool(args.model))
    net = read_net(site, [read(file, "all_reduce") for file in args.check])
    known = max(args.gpus, args.explain or 1)
    if "between" not in net and known > net["gpus_per_node"]:
        print("Only one node was checked: for more, add --check of two, or --site\n")
        known = net["gpus_per_node"]
    case = {"batch": args.batch_size, "images": 1281167, "counts": "images"}
    case["fixed"] = 0
    if args.files:
        case, two = measured_case(args.files, args.images)
    elif told:
        case |= {"each": 1 / args.speed, "gradients": args.gradients * 1e6}
    else:
        case |= model_case(args.model, site, "fp16" if args.amp else "fp32")
    case["images"] = args.images or case["images"]
    case |= {"overlap": True, "accumulate": 1, "loader": 1e9, "storage": 1e9}
    case["group"] = GROUP * (case["fixed"] + case["batch"] * case["each"])
    if two:
        case["group"] = group_seconds(two, case["batch"], case, net)
    case |= {
        name: getattr(args, name) for name in ("accumulate", "loader", "storage")
    }
    whole, most = args.whole or case["batch"], min(args.gpus, known)
    kinds = {f"Weak scaling, {case['batch']} per GPU": rows(case, net, most)}
    kinds[f"Strong scaling, {whole} in all"] = rows(case, net, most, whole)
    draw(kinds, case["counts"], args.plot)  # before a pipe may close
    watts = site.get("watts", {}).get("per_gpu")
    for kind, found in kinds.items():
        print(kind, *table(found, case["counts"], watts), sep="\n")
        print(verdict(found, most), end="\n\n")
    if args.explain:
        n = min(args.explain, known)
        print(f"A step on {n} GPU{'s' * (n > 1)}, {case['batch']} each:")
        print(*explain(n, case["batch"], case, net), sep="\n", end="\n\n")
    print(f"Plot saved to {Path(args.plot).absolute()}")


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends it in silence
    main()
