"""The time of a DDP step on n GPUs: the model behind predict.py.

A step consists of the compute of one GPU on its batch, the sync overhead, which
stretches the compute, and the part of the all-reduces that ends after the backward
pass. DDP all-reduces the gradients in buckets, one after another, each as soon as it
is ready. README.md has the sources and the errors of the model.
"""

import json
import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import linear_regression
from typing import NamedTuple

import numpy as np

from common.errors import UserError

MIB = 2**20
# DDP's buckets (bucket_cap_mb, and torch.distributed's _DEFAULT_FIRST_BUCKET_BYTES).
# The first is small, to start early. DDP never splits a tensor, and its buckets may
# be larger.
FIRST_BUCKET, BUCKET_CAP = MIB, 25 * MIB
BACKWARD = 2 / 3  # of the compute: two products for each product of the forward pass
SYNC_OVERHEAD = 0.06  # of the compute, without a run on two GPUs
# Of a data sheet's bandwidth, for large messages: with NVLink or peer-to-peer over
# PCIe, and with copies through the host's memory.
BANDWIDTH_EFFICIENCY = 0.8
HOST_EFFICIENCY = 0.55
PCIE_OVERLAP = 0.2  # of the backward pass hides all-reduces; all of it with NVLink
# The last two were fitted to 42 published runs on two GPUs; see README.md.
SPREAD = 1.03  # between equal runs on equal machines: of 20 servers with 8 H100
# From NCCL's src/graph/tuning.cc, protocol Simple, in seconds: the start of an
# all-reduce, a hop between two GPUs, between two nodes, and between two GPUs of a
# tree.
STARTUP = 8.4e-6
HOP = {"NVLink": 3.4e-6, "PCIe": 5.7e-6}
NETWORK_HOP = 14e-6
TREE_HOP = 4e-6
RING_PENALTY = 1.4  # on a ring's latency over several nodes (1.9 before the A100)
TREE_EFFICIENCY = 0.55  # 0.92 x 0.85 x NCCL's correction for 1 to 64 MiB


@dataclass
class Workload:
    """The work of a GPU in a step, and the size of its gradients."""

    batch: int  # per GPU
    gradient_bytes: float
    sample_seconds: float  # per sample of a batch
    fixed_seconds: float = 0  # per batch, whatever its size
    sync_overhead: float | None = None  # seconds; default: SYNC_OVERHEAD
    overlap: bool = True  # of the all-reduces with the backward pass
    accumulate: int = 1  # batches per all-reduce
    loader_rate: float = math.inf  # images/s of the loader of one GPU
    storage_rate: float = math.inf  # images/s of the storage that all GPUs share

    def __post_init__(self):
        if self.sync_overhead is None:
            self.sync_overhead = SYNC_OVERHEAD * self.batch_seconds

    @property
    def batch_seconds(self):
        return self.fixed_seconds + self.batch * self.sample_seconds


@dataclass
class Links:
    """The links between GPUs, "inside" a node and "between" nodes."""

    bandwidth: dict  # GB/s: inside, from a GPU to its neighbour; between, per node
    hop: dict  # seconds
    gpus_per_node: int = 1
    startup: float = STARTUP
    has_trees: bool = True  # NCCL has trees, Gloo only rings
    shared: tuple | None = None  # this many GPUs of a node share so many GB/s
    overlap: float = 1  # of the backward pass that hides all-reduces
    full_speed: float = 1 / BANDWIDTH_EFFICIENCY  # factor on a node's, for "from"
    # From check.py: processes, processes per node, and {bytes: seconds}.
    checks: dict = field(default_factory=dict)


class Step(NamedTuple):
    """The parts of a step in seconds, and the all-reduces of its buckets."""

    compute: float
    sync_overhead: float
    network: float
    loading: float
    buckets: list  # of (bytes, seconds until it is ready, starts and ends)

    @property
    def seconds(self):
        return self.compute + self.sync_overhead + self.network + self.loading


def load_json(file, *keys):
    """Return the content of a JSON file that has these keys, or raise UserError."""
    try:
        content = json.loads(Path(file).read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {file}: {error}") from None
    for key in keys:
        if not isinstance(content, dict) or not content.get(key):
            raise UserError(f"no {key} in {file}; choose another file")
    return content


def load_site(name):
    """Return a site of sites/ or of another file, or raise UserError."""
    folder = Path(__file__).parent / "sites"
    known = {file.stem: file for file in sorted(folder.glob("*.json"))}
    if name not in known and not Path(name).exists():
        raise UserError(f"no site {name}; choose a file, or {', '.join(known)}")
    return load_json(known.get(name, name), "gpus_per_node", "inside")


def positive(number):
    """Return this number; raise ValueError if it is not positive and finite."""
    if not 0 < number < math.inf:
        raise ValueError(f"{number} is not a positive number")
    return number


def check_positive(site):
    """Raise ValueError if a number of a site is not positive."""
    for value in site.values():
        if isinstance(value, dict):
            check_positive(value)
        elif type(value) in (int, float):
            positive(value)


def make_links(site, checks=()):
    """Return the Links of a site and of check.py's measurements.

    site: a dict as in sites/, or None; checks: dicts of check.py's files. A check
    overrides the site, and the one with the most processes counts. Raises
    LookupError, TypeError, ValueError or AttributeError if a dict has another form.
    """
    hop = {"inside": HOP["NVLink"], "between": NETWORK_HOP}
    links = Links({"inside": math.inf}, hop)
    if site:
        add_site(links, site)
    rows, pairs = {"inside": [], "between": []}, []
    for check in checks:
        for row in check["all_reduce"]:
            where = "between" if row["nodes"] > 1 else "inside"
            rows[where].append(row | {"backend": check["backend"]})
        for row in check.get("pairs", []):
            pairs.append(row | {"backend": check["backend"]})
    for where in ("inside", "between"):
        if rows[where]:
            add_check(links, where, rows[where])
    if pairs:
        add_pairs(links, max(pairs, key=lambda row: row["processes"]))
    if not site:
        numbers = [per_node for _, per_node, _ in links.checks.values()]
        links.gpus_per_node = max(numbers, default=1)
    return links


def reached_bandwidth(link, efficiency):
    """Return the GB/s that large messages reach, of the data sheet's GB/s.

    efficiency: unless the link has its own.
    """
    return link["gb_per_s"] * link.get("efficiency", efficiency)


def add_site(links, site):
    """Set the links to those of a site's data sheets."""
    check_positive(site)
    inside = site["inside"]
    links.gpus_per_node = site["gpus_per_node"]
    links.hop["inside"] = HOP.get(inside.get("kind"), HOP["NVLink"])
    efficiency = BANDWIDTH_EFFICIENCY
    if inside.get("kind") == "PCIe" and links.gpus_per_node > 1:
        links.overlap = PCIE_OVERLAP
        if not inside.get("peer_to_peer", True):
            efficiency = HOST_EFFICIENCY
            links.full_speed = 1 / HOST_EFFICIENCY
    links.bandwidth["inside"] = reached_bandwidth(inside, efficiency)
    if shared := inside.get("shared"):
        total = reached_bandwidth(shared, efficiency)
        links.shared = shared["gpus"], total
    if "between" in site:
        between = reached_bandwidth(site["between"], BANDWIDTH_EFFICIENCY)
        links.bandwidth["between"] = between


def add_check(links, where, rows):
    """Set the links there, from the rows with the most processes."""
    n = max(positive(row["processes"]) for row in rows)
    rows = [row for row in rows if row["processes"] == n]
    seconds = {}
    for row in rows:  # the slowest of several nodes counts
        size, time = positive(row["bytes"]), positive(row["seconds"])
        seconds[size] = max(time, seconds.get(size, 0))
    fastest = max(size / time for size, time in seconds.items())
    links.bandwidth[where] = 2 * (n - 1) / n * fastest / 1e9
    links.checks[where] = n, n // positive(rows[0]["nodes"]), seconds
    if rows[0]["backend"] == "gloo":
        links.has_trees = False
        links.startup = 0
        links.hop[where] = min(seconds.values()) / 2 / (n - 1)


def add_pairs(links, row):
    """Set the links within a node to the speed of pairs, alone and all at once."""
    gpus, size = positive(row["processes"]), positive(row["bytes"])
    alone = size / positive(row["alone_seconds"]) / 1e9
    at_once = size / positive(row["at_once_seconds"]) / 1e9
    links.bandwidth["inside"] = alone
    links.shared = gpus, gpus * min(alone, at_once)
    if row["backend"] == "nccl" and at_once < 0.8 * alone:  # NVLink is not shared
        links.overlap = PCIE_OVERLAP


def slowest_link(n, links):
    """Return the GB/s of the slowest link of a ring of n GPUs."""
    gpus_per_node = min(n, links.gpus_per_node)
    speeds = []
    if gpus_per_node > 1:
        speeds.append(links.bandwidth["inside"])
        if links.shared:
            shared_by, total = links.shared
            speeds.append(total / min(gpus_per_node, shared_by))
    if n > links.gpus_per_node:
        speeds.append(links.bandwidth["between"])
    return min(speeds)


def all_reduce_parts(size, n, links, network_factor=1):
    """Return the faster algorithm, and its seconds of latency and of transfer.

    size: bytes; n: GPUs, more than one; network_factor: factor on the links'
    bandwidth.
    """
    nodes = math.ceil(n / links.gpus_per_node)
    gpus_per_node = min(n, links.gpus_per_node)
    bandwidth = slowest_link(n, links) * network_factor
    hop, network_hop = links.hop["inside"], links.hop["between"]
    between = 2 * (nodes - 1)
    inside = 2 * (n - 1) - between
    latency = links.startup + inside * hop + between * network_hop
    if nodes > 1 and links.has_trees:
        latency *= RING_PENALTY
    ring = "ring", latency, size * 2 * (n - 1) / n / bandwidth / 1e9
    if not links.has_trees:
        return ring
    hops = 2 * (gpus_per_node - 1) * TREE_HOP + 2 * math.log2(nodes) * network_hop
    transfer = 2 * size / bandwidth / TREE_EFFICIENCY / 1e9
    tree = "tree", links.startup + hops, transfer
    return min(ring, tree, key=lambda parts: parts[1] + parts[2])


def all_reduce_formula(size, n, links, network_factor=1):
    """Return the seconds of an all-reduce by NCCL's formulas."""
    _, latency, transfer = all_reduce_parts(size, n, links, network_factor)
    return latency + transfer


def all_reduce_seconds(size, n, links, network_factor=1):
    """Return the formula's seconds, scaled to check.py's measurements, if any."""
    seconds = all_reduce_formula(size, n, links, network_factor)
    where = "between" if n > links.gpus_per_node else "inside"
    if where not in links.checks:
        return seconds
    processes, gpus_per_node, points = links.checks[where]
    sizes = sorted(points)
    measured = np.interp(size, sizes, [points[s] for s in sizes])
    largest = sizes[-1]
    if size > largest:  # extrapolate from the last two sizes
        previous = sizes[-2] if len(sizes) > 1 else 0
        more_seconds = points[largest] - points.get(previous, 0)
        measured += more_seconds / (largest - previous) * (size - largest)
    checked = replace(links, gpus_per_node=gpus_per_node)
    return float(seconds * measured / all_reduce_formula(size, processes, checked))


def fit_compute(seconds, batch):
    """Return the seconds per sample, and the fixed seconds per batch.

    seconds: {batch size: seconds of a step} on one GPU; batch: the size to match.
    Several sizes are fitted by a line.
    """
    fixed = 0
    if len(seconds) > 1:
        line = linear_regression([*seconds], [*seconds.values()])
        fixed = min(max(line.intercept, 0), seconds[batch])
    return (seconds[batch] - fixed) / batch, fixed


def fit_sync_overhead(two_gpu_seconds, workload, links):
    """Return the sync overhead with which a step on two GPUs takes this long."""
    links = replace(links, gpus_per_node=2)
    low, high = 0, two_gpu_seconds
    for _ in range(40):  # bisection: the step grows with the overhead
        middle = (low + high) / 2
        step = predict_step(2, replace(workload, sync_overhead=middle), links)
        if step.seconds < two_gpu_seconds:
            low = middle
        else:
            high = middle
    return low


def predict_step(n, workload, links, network_factor=1, overhead_factor=1):
    """Return the Step on n GPUs.

    network_factor, overhead_factor: factors on the links' bandwidth and the
    overhead.
    """
    compute = workload.batch_seconds * workload.accumulate
    overhead = overhead_factor * workload.sync_overhead if n > 1 else 0
    backward_end = compute + overhead
    # The overhead stretches the last batch, which has the all-reduces.
    backward = BACKWARD * (workload.batch_seconds + overhead)
    end, done, buckets = 0, 0, []
    while n > 1 and done < workload.gradient_bytes:
        cap = BUCKET_CAP if done else FIRST_BUCKET
        size = min(cap, workload.gradient_bytes - done)
        done += size
        left = 1 - done / workload.gradient_bytes
        ready = backward_end - backward * left * workload.overlap * links.overlap
        start = max(ready, end)
        end = start + all_reduce_seconds(size, n, links, network_factor)
        buckets.append((size, ready, start, end))
    network = max(end - backward_end, 0)
    images = workload.batch * workload.accumulate
    load = max(images / workload.loader_rate, n * images / workload.storage_rate)
    loading = max(load - (backward_end + network), 0)
    return Step(compute, overhead, network, loading, buckets)


def best_and_worst(n, workload, links):
    """Return the Steps with a fast and with a slow network.

    The fast network has the measured speed, or the full speed of the data sheet. The
    overhead with the slow one grows about as fast as the delay of the slowest of n
    GPUs. Over PCIe the fast one hides behind the whole backward pass, the slow one
    behind none of it.
    """
    fast, slow = scale_compute(workload, 1 / SPREAD), scale_compute(workload, SPREAD)
    hidden, visible = links, links
    if links.overlap < 1:
        hidden, visible = replace(links, overlap=1), replace(links, overlap=0)
    full_speed = 1 / BANDWIDTH_EFFICIENCY
    if links.checks:
        full_speed = 1
    elif n <= links.gpus_per_node:
        full_speed = links.full_speed
    best = predict_step(n, fast, hidden, full_speed, overhead_factor=0)
    waiting = 2 * math.sqrt(math.log2(max(n, 2)))
    return best, predict_step(n, slow, visible, 0.5, overhead_factor=waiting)


def scale_compute(workload, factor):
    """Return the Workload with this factor on its compute."""
    fixed, sample = workload.fixed_seconds, workload.sample_seconds
    return replace(
        workload, fixed_seconds=factor * fixed, sample_seconds=factor * sample
    )
