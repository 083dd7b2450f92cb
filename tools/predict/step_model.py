"""The time of a DDP step on n GPUs: the model behind predict.py.

A step consists of the compute of one GPU on its batch, the sync overhead, which
stretches the compute, and the part of the all-reduces that ends after the backward
pass. DDP all-reduces the gradients in buckets, one after another, each as soon as it
is ready. README.md has the sources and the errors of the model.
"""

import math
from dataclasses import dataclass, replace
from statistics import linear_regression
from typing import NamedTuple

from links import all_reduce_seconds

MIB = 2**20
# DDP's buckets (bucket_cap_mb, and torch.distributed's _DEFAULT_FIRST_BUCKET_BYTES).
# The first is small, to start early. DDP never splits a tensor, and its buckets may
# be larger.
FIRST_BUCKET, BUCKET_CAP = MIB, 25 * MIB
BACKWARD = 2 / 3  # of the compute: two products for each product of the forward pass
# The assumed sync overhead on two GPUs, if no run has measured it. WAITING for the
# other GPU is a fraction of the compute. COPYING gradients to buckets and back is in
# seconds per byte.
WAITING = 0.02
COPYING = 0.02e-9
WAITING_FOR_NODES = 0.5  # more of WAITING per doubling of the nodes
SPREAD = 0.99, 1.03  # of the compute; README.md lists the runs behind it


@dataclass
class Workload:
    """The work of a GPU in a step, and the size of its gradients."""

    batch: int  # per GPU
    gradient_bytes: float
    sample_seconds: float  # per sample of a batch
    fixed_seconds: float = 0  # per batch, whatever its size
    sync_overhead: float | None = None  # seconds on two GPUs, if measured
    overlap: bool = True  # of the all-reduces with the backward pass
    accumulate: int = 1  # batches per all-reduce
    loader_rate: float = math.inf  # images/s of the loader of one GPU

    @property
    def batch_seconds(self):
        return self.fixed_seconds + self.batch * self.sample_seconds

    def overhead_seconds(self, n, links):
        """Return the sync overhead on n GPUs.

        The delay of the slowest of n GPUs grows about with the root of log2(n).
        """
        if n == 1:
            return 0
        waiting = WAITING * self.batch_seconds * self.accumulate
        growth = math.sqrt(math.log2(n))
        if self.sync_overhead is not None:
            grows = min(waiting, self.sync_overhead)
            return self.sync_overhead + grows * (growth - 1)
        nodes = math.ceil(n / links.gpus_per_node)
        growth *= 1 + WAITING_FOR_NODES * links.overlap * math.log2(nodes)
        return waiting * growth + COPYING * self.gradient_bytes


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


def fit_compute(seconds, batch):
    """Return the seconds per sample of this batch, and the fixed seconds per batch.

    seconds: {batch size: seconds of a step} on one GPU, fitted by a line.
    """
    fixed = 0
    if len(seconds) > 1:
        line = linear_regression([*seconds], [*seconds.values()])
        fixed = min(max(line.intercept, 0), seconds[batch])
    return (seconds[batch] - fixed) / batch, fixed


def fit(field, seconds, n, workload, links):
    """Return the Workload with a field set so that n GPUs take these seconds.

    field: "sync_overhead", or "sample_seconds" if no run on one GPU is known.
    """
    if n == 2:  # they are on one node
        links = replace(links, gpus_per_node=2)
    low, high = 0, seconds
    for _ in range(60):  # bisection: the step grows with the field
        middle = (low + high) / 2
        fitted = replace(workload, **{field: middle})
        if predict_step(n, fitted, links).seconds < seconds:
            low = middle
        else:
            high = middle
    return fitted


def predict_step(n, workload, links, network_factor=1, overhead_factor=1):
    """Return the Step on n GPUs. Factors are those of bandwidth and overhead."""
    compute = workload.batch_seconds * workload.accumulate
    overhead = overhead_factor * workload.overhead_seconds(n, links)
    backward_end = compute + overhead
    # The overhead stretches all batches; the last one has the all-reduces.
    backward = BACKWARD * backward_end / workload.accumulate
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
    loading = max(images / workload.loader_rate - (backward_end + network), 0)
    return Step(compute, overhead, network, loading, buckets)


def best_and_worst(n, workload, links):
    """Return the Steps with a fast and with a slow network.

    The fast network has the measured speed, or the full one of the data sheet. Over
    PCIe it hides behind the whole backward pass, and the slow one behind none of it.
    A measured sync overhead counts half to twice; an assumed one counts up to four
    times, or not at all.
    """
    fast, slow = (scale_compute(workload, factor) for factor in SPREAD)
    hidden = replace(links, overlap=1)
    visible = replace(links, overlap=0) if links.overlap < 1 else links
    where = "between" if n > links.gpus_per_node else "inside"
    full_speed = 1 if links.checks else 1 / links.efficiency.get(where, 1)
    least, most = (0, 4) if workload.sync_overhead is None else (0.5, 2)
    best = predict_step(n, fast, hidden, full_speed, overhead_factor=least)
    return best, predict_step(n, slow, visible, 0.5, overhead_factor=most)


def scale_compute(workload, factor):
    """Return the Workload with this factor on its compute."""
    fixed, sample = factor * workload.fixed_seconds, factor * workload.sample_seconds
    return replace(workload, fixed_seconds=fixed, sample_seconds=sample)
