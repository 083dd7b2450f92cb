"""The links between GPUs, and the time of an all-reduce over them.

The formulas are NCCL's, and rings for Gloo. README.md has the sources.
"""

import json
import math
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from common.errors import UserError

# The fraction of a data sheet's bandwidth that large messages reach: with NVLink or
# peer-to-peer over PCIe, and with copies through the host's memory.
BANDWIDTH_EFFICIENCY = 0.8
HOST_EFFICIENCY = 0.65
# The fraction of the backward pass that hides all-reduces over PCIe. NVLink's is 1.
# This and the 0.65 were fitted to 42 published runs on two GPUs; see README.md.
PCIE_OVERLAP = 0.1
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
class Links:
    """The links between GPUs, "inside" a node and "between" nodes."""

    bandwidth: dict  # GB/s: inside, from a GPU to its neighbour; between, per node
    hop: dict  # seconds
    up_to: dict = field(default_factory=dict)  # {GPUs: GB/s "inside"}
    gpus_per_node: int = 1
    startup: float = STARTUP
    has_trees: bool = True  # NCCL has trees, Gloo only rings
    shared: tuple | None = None  # (GPUs of a node, GB/s that they share)
    efficiency: dict = field(default_factory=dict)  # of a data sheet's bandwidth
    overlap: float = 1  # of the backward pass that hides all-reduces
    # From check.py: processes, processes per node, and {bytes: seconds}.
    checks: dict = field(default_factory=dict)


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


def make_links(site, checks=()):
    """Return the Links of a site and of check.py's measurements.

    site: a dict as in sites/, or None; checks: dicts of check.py's files. A check
    overrides the site, and the one with the most processes counts.
    """
    hop = {"inside": HOP["NVLink"], "between": NETWORK_HOP}
    links = Links({"inside": math.inf}, hop)
    if site:
        add_site(links, site)
    rows = {"inside": [], "between": []}
    for check in checks:
        for row in check["all_reduce"]:
            where = "between" if row["nodes"] > 1 else "inside"
            rows[where].append(row | {"backend": check["backend"]})
    for where in ("inside", "between"):
        if rows[where]:
            add_check(links, where, rows[where])
    if not site:
        numbers = [per_node for _, per_node, _ in links.checks.values()]
        links.gpus_per_node = max(numbers, default=1)
    return links


def add_site(links, site):
    """Set the links to those of a site's data sheets."""
    inside = site["inside"]
    links.gpus_per_node = site["gpus_per_node"]
    links.hop["inside"] = HOP.get(inside.get("kind"), HOP["NVLink"])
    efficiency = BANDWIDTH_EFFICIENCY
    if inside.get("kind") == "PCIe" and links.gpus_per_node > 1:
        links.overlap = PCIE_OVERLAP
        if not inside.get("peer_to_peer", True):
            efficiency = HOST_EFFICIENCY
    efficiency = inside.get("efficiency", efficiency)
    links.efficiency["inside"] = efficiency
    links.bandwidth["inside"] = efficiency * inside["gb_per_s"]
    for gpus, speed in inside.get("gb_per_s_up_to", {}).items():
        links.up_to[int(gpus)] = efficiency * speed
    if shared := inside.get("shared"):
        links.shared = shared["gpus"], efficiency * shared["gb_per_s"]
    if link := site.get("between"):
        efficiency = link.get("efficiency", BANDWIDTH_EFFICIENCY)
        links.efficiency["between"] = efficiency
        links.bandwidth["between"] = efficiency * link["gb_per_s"]


def add_check(links, where, rows):
    """Set the links there, from the rows with the most processes."""
    n = max(row["processes"] for row in rows)
    rows = [row for row in rows if row["processes"] == n]
    seconds = {}
    for row in rows:  # the slowest of several nodes counts
        size, time = row["bytes"], row["seconds"]
        seconds[size] = max(time, seconds.get(size, 0))
    fastest = max(size / time for size, time in seconds.items())
    links.bandwidth[where] = 2 * (n - 1) / n * fastest / 1e9
    links.checks[where] = n, n // rows[0]["nodes"], seconds
    if rows[0]["backend"] == "gloo":
        links.has_trees = False
        links.startup = 0
        links.hop[where] = min(seconds.values()) / 2 / (n - 1)


def inside_bandwidth(gpus, links):
    """Return the GB/s of a GPU's links to the others of a node that take part.

    Without a switch, a pair of GPUs has only some of their links.
    """
    limits = [limit for limit in links.up_to if limit >= gpus]
    return links.up_to[min(limits)] if limits else links.bandwidth["inside"]


def slowest_link(n, links):
    """Return the GB/s of the slowest link of a ring of n GPUs."""
    gpus_per_node = min(n, links.gpus_per_node)
    speeds = []
    if gpus_per_node > 1:
        speeds.append(inside_bandwidth(gpus_per_node, links))
        if links.shared:
            shared_by, total = links.shared
            speeds.append(total / min(gpus_per_node, shared_by))
    if n > links.gpus_per_node:
        speeds.append(links.bandwidth["between"])
    return min(speeds)


def all_reduce_formula(size, n, links, network_factor=1):
    """Return the seconds of an all-reduce by the faster of NCCL's two algorithms.

    size: bytes; n: GPUs; network_factor: a factor on the links' bandwidth.
    """
    nodes = math.ceil(n / links.gpus_per_node)
    gpus_per_node = min(n, links.gpus_per_node)
    bandwidth = slowest_link(n, links) * network_factor * 1e9
    hop, network_hop = links.hop["inside"], links.hop["between"]
    between = 2 * (nodes - 1)
    inside = 2 * (n - 1) - between
    latency = links.startup + inside * hop + between * network_hop
    if nodes > 1 and links.has_trees:
        latency *= RING_PENALTY
    ring = latency + size * 2 * (n - 1) / n / bandwidth
    if not links.has_trees:
        return ring
    hops = 2 * (gpus_per_node - 1) * TREE_HOP + 2 * math.log2(nodes) * network_hop
    tree = links.startup + hops + 2 * size / bandwidth / TREE_EFFICIENCY
    return min(ring, tree)


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
