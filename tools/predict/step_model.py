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

from links import BANDWIDTH_EFFICIENCY, all_reduce_seconds

MIB = 2**20
# DDP's buckets (bucket_cap_mb, and torch.distributed's _DEFAULT_FIRST_BUCKET_BYTES).
# The first is small, to start early. DDP never splits a tensor, and its buckets may
# be larger.
FIRST_BUCKET, BUCKET_CAP = MIB, 25 * MIB
BACKWARD = 2 / 3  # of the compute: two products for each product of the forward pass
SYNC_OVERHEAD = 0.06  # of the compute, without a run on two GPUs
SPREAD = 1.03  # between equal runs on equal machines: of 20 servers with 8 H100


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

    def __post_init__(self):
        if self.sync_overhead is None:
            self.sync_overhead = SYNC_OVERHEAD * self.batch_seconds

    @property
    def batch_seconds(self):
        return self.fixed_seconds + self.batch * self.sample_seconds


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
    """Return the Step on n GPUs. Factors are those of bandwidth and overhead."""
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
    loading = max(images / workload.loader_rate - (backward_end + network), 0)
    return Step(compute, overhead, network, loading, buckets)


def best_and_worst(n, workload, links):
    """Return the Steps with a fast and with a slow network.

    The fast network has the measured speed, or the full speed of the data sheet. The
    overhead with the slow one grows about as fast as the delay of the slowest of n
    GPUs. Over PCIe the fast one hides behind the whole backward pass, the slow one
    behind none of it.
    """
    fast, slow = scale_compute(workload, 1 / SPREAD), scale_compute(workload, SPREAD)
    hidden = replace(links, overlap=1)
    visible = replace(links, overlap=0) if links.overlap < 1 else links
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
    fixed, sample = factor * workload.fixed_seconds, factor * workload.sample_seconds
    return replace(workload, fixed_seconds=fixed, sample_seconds=sample)
