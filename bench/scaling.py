"""How long a step of DDP takes on n GPUs: the model behind predict.py.

A step is the work of one GPU on its batch, what it costs to be in a group at all,
which stretches the work, and what sticks out of the all-reduces, that is: ends after
the backward pass. DDP all-reduces the gradients in buckets, each as soon as it is
ready, one after another. bench/README.md has the sources, and how far off it was.
"""

import json
import math
from pathlib import Path
from statistics import linear_regression

import numpy as np

from common.cli import UserError

MB = 2**20
# DDP's buckets (bucket_cap_mb, and torch.distributed's _DEFAULT_FIRST_BUCKET_BYTES):
# the first is small, to start early. DDP never splits a tensor: these are the least.
FIRST, CAP = MB, 25 * MB
BACKWARD = 2 / 3  # of the work: two products for each one of the forward pass
GROUP = 0.06  # of the work, where no run on two GPUs says it
REACHED = 0.8  # of a data sheet's bandwidth, by large messages
# NCCL's src/graph/tuning.cc, protocol Simple: seconds to start, and for a hop of a
# tree, between nodes, and between two GPUs; how much longer a ring takes for these
# over several nodes (1.9 before the A100); and a tree's share of a ring's bandwidth,
# 0.92 x 0.85 x its correction for 1 to 64 MiB.
START, TREE_HOP, NETWORK_HOP = 8.4e-6, 4e-6, 14e-6
HOP = {"NVLink": 3.4e-6, "PCIe": 5.7e-6}
PLATEAU, TREE = 1.4, 0.55


def read(file, *keys):
    """Return what a JSON file holds, which has these keys, or raise UserError."""
    try:
        content = json.loads(Path(file).read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {file}: {error}") from None
    for key in keys:
        if not content.get(key):
            raise UserError(f"{file} has no {key}: type another file")
    return content


def read_site(name, *keys):
    """Return a site of bench/sites/, or of a file like those, or raise UserError."""
    sites = Path(__file__).parent / "sites"
    known = {file.stem: file for file in sorted(sites.glob("*.json"))}
    if name not in known and not Path(name).exists():
        raise UserError(f"no site {name}: type a file, or one of {', '.join(known)}")
    return read(known.get(name, name), "gpus_per_node", "inside", *keys)


def read_net(site, checks=()):
    """Return what formula() and all_reduce() want to know of the GPUs' links.

    site: a dict as in bench/sites/, or None; checks: dicts of check.py's files. For
    links in a node, and between nodes, the check of the most processes counts.
    """
    net = {"measured": {}, "trees": True, "start": START, "hop": HOP["NVLink"]}
    net |= {"network_hop": NETWORK_HOP, "inside": math.inf}
    if site:
        net["hop"] = HOP.get(site["inside"].get("kind"), HOP["NVLink"])
        for way in {"inside", "between"} & {*site}:
            net[way] = site[way]["gb_per_s"] * site[way].get("reached", REACHED)
    found = [
        (check["backend"], row) for check in checks for row in check["all_reduce"]
    ]
    for backend, row in sorted(found, key=lambda f: -f[1]["processes"]):
        n, size, many = row["processes"], row["bytes"], row["nodes"] > 1
        way, hop = ("between", "network_hop") if many else ("inside", "hop")
        first = net["measured"].setdefault(way, (n, n // row["nodes"], {}))
        if n == first[0]:
            points = first[2]  # of several nodes the slowest counts
            points[size] = max(row["seconds"], points.get(size, 0))
            net[way] = 2 * (n - 1) / n * max(s / t for s, t in points.items()) / 1e9
            if backend == "gloo":  # it has rings alone
                net |= {"start": 0, "trees": False}
                net[hop] = min(points.values()) / 2 / (n - 1)
    layouts = [here for _, here, _ in net["measured"].values()]
    net["gpus_per_node"] = (site or {}).get("gpus_per_node") or max(
        layouts, default=1
    )
    return net


def formula(size, n, net, faster=1):
    """Return the seconds of an all-reduce, for hops and for bytes, and how in words.

    size: bytes; n: GPUs, of full nodes; net: gpus_per_node; inside and between, GB/s
    of a GPU to its neighbour, and of a whole node; start, hop, network_hop: seconds;
    trees: are there any; faster: a factor for both bandwidths.
    """
    here, nodes = min(n, net["gpus_per_node"]), math.ceil(n / net["gpus_per_node"])
    ways = ["inside"] * (here > 1) + ["between"] * (nodes > 1)
    speed = min(net[way] for way in ways) * faster
    far, hop, network = 2 * (nodes - 1), net["hop"], net["network_hop"]
    near, longer = 2 * (n - 1) - far, PLATEAU if nodes > 1 and net["trees"] else 1
    words = f"ring: {near} x {us(hop)} + {far} x {us(network)}, x {longer}; "
    words += f"{2 * (n - 1)}/{n} of the bytes at {speed:.3g} GB/s"
    hops = longer * (net["start"] + near * hop + far * network)
    ring = hops, size * 2 * (n - 1) / n / speed / 1e9, words
    near, far = 2 * (here - 1), 2 * math.log2(nodes)
    words = f"tree: {near} x {us(TREE_HOP)} + {far:.3g} x {us(network)}; "
    words += f"2 x the bytes at {TREE} x {speed:.3g} GB/s"
    hops = net["start"] + near * TREE_HOP + far * network
    tree = hops, 2 * size / speed / TREE / 1e9, words
    return min(ring, tree, key=lambda t: t[0] + t[1]) if net["trees"] else ring


def all_reduce(size, n, net, faster=1):
    """Return the formula's seconds, scaled by check.py's where it has measured."""
    seconds = sum(formula(size, n, net, faster)[:2])
    where = "between" if n > net["gpus_per_node"] else "inside"
    if where not in net["measured"]:
        return seconds
    processes, here, points = net["measured"][where]
    sizes = sorted(points)
    measured = np.interp(size, sizes, [points[s] for s in sizes])
    if size > sizes[-1]:  # more bytes than were sent: as fast as the last of these
        a, b = [0, *sizes][-2:]
        measured += (points[b] - points.get(a, 0)) / (b - a) * (size - b)
    there = formula(size, processes, net | {"gpus_per_node": here})
    return float(seconds * measured / sum(there[:2]))


def work(seconds, batch):
    """Return what step() wants to know of one GPU's work, as a dict.

    seconds: {batch: of a step}, batch: one of them. With several the work is a line:
    what any batch costs, however small, and each image in it.
    """
    fixed = 0
    if len(seconds) > 1:
        line = linear_regression([*seconds], [*seconds.values()])
        fixed = min(max(line.intercept, 0), seconds[batch])
    return {"fixed": fixed, "each": (seconds[batch] - fixed) / batch}


def group_seconds(two, batch, case, net):
    """Return what being in a group costs, by the seconds of a step on two GPUs."""
    least, most = 0, two
    for _ in range(40):  # bisection: the step grows with what the group costs
        middle = (least + most) / 2
        parts, _ = step(
            2, batch, case | {"group": middle}, net | {"gpus_per_node": 2}
        )
        if sum(parts.values()) < two:
            least = middle
        else:
            most = middle
    return least


def step(n, batch, case, net, faster=1, group=1):
    """Return the parts of a step on n GPUs, in seconds, and its all-reduces.

    batch: of a GPU. case: fixed and each, seconds of any batch and of each image in
    it; accumulate, batches for one all-reduce; gradients, bytes; overlap, of these
    with the backward pass; group, seconds; loader and storage, images/s of a GPU's
    loader and of all storage. faster, group: factors, of the network and case's.
    Of each all-reduce: bytes, and when it was ready, began and ended.
    """
    last, images = case["fixed"] + batch * case["each"], batch * case["accumulate"]
    parts = {"work": last * case["accumulate"], "group": group * case["group"]}
    parts["group"] *= n > 1
    work, last = sum(parts.values()), last + parts["group"]  # it stretches the last
    end, done, buckets = 0, 0, []
    while n > 1 and done < case["gradients"]:
        size = min(CAP if done else FIRST, case["gradients"] - done)
        done += size
        late = BACKWARD * last * (1 - done / case["gradients"]) * case["overlap"]
        begin = max(work - late, end)
        end = begin + all_reduce(size, n, net, faster)
        buckets.append((size, work - late, begin, end))
    parts["network"] = max(end - work, 0)
    load = max(images / case["loader"], n * images / case["storage"])
    parts["loader"] = max(load - sum(parts.values()), 0)
    return parts, buckets


def extremes(n, measured=False):
    """Return step()'s (faster, group) for a fast and for a slow network of n GPUs.

    measured: is its full speed known, or only what a data sheet promises.
    """
    wait = 2 * math.sqrt(math.log2(max(n, 2)))  # about as the slowest of n is slower
    return (1 if measured else 1 / REACHED, 0), (0.5, wait)


def explain(n, batch, case, net):
    """Return the arithmetic of a step on n GPUs, as lines."""
    parts, buckets = step(n, batch, case, net)
    last = parts["work"] / case["accumulate"] + parts["group"]
    lines = [f"work: {case['accumulate']} x ({ms(case['fixed'])} + {batch} x "]
    lines[0] += (
        f"{ms(case['each'])}) = {ms(parts['work'])}; group: {ms(parts['group'])}"
    )
    lines += [
        f"backward: 2/3 x {ms(last)}, the last batch with what the group costs"
    ]
    for size, ready, begin, end in buckets:
        hops, sent, words = formula(size, n, net)
        line = f"{size / MB:.1f} MiB, ready at {ms(ready)}, begins at {ms(begin)}: "
        line += f"{ms(hops)} + {ms(sent)} ({words})"
        factor = (end - begin) / (hops + sent)
        line += f", x {factor:.2f} as measured" * (abs(factor - 1) > 1e-6)
        lines.append(f"{line}, ends at {ms(end)}")
    if len(lines) > 8:
        lines[5:-2] = ["..."]
    lines += [f"{name}: {ms(seconds)}" for name, seconds in parts.items()]
    return [*lines, f"in all: {ms(sum(parts.values()))}"]


def ms(seconds):
    return f"{seconds * 1e3:.2f} ms"


def us(seconds):
    return f"{seconds * 1e6:.3g} us"
