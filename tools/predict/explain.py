"""The arithmetic of one prediction, line by line: `predict.py --explain 8`."""

from fractions import Fraction
from math import ceil

from links import (
    TREE_EFFICIENCY,
    all_reduce_parts,
    all_reduce_seconds,
    inside_bandwidth,
    slowest_link,
)
from step_model import BACKWARD, BUCKET_CAP, predict_step


def explain_step(n, workload, links):
    """Return the lines with the arithmetic of a step on n GPUs."""
    step = predict_step(n, workload, links)
    nodes, images = ceil(n / links.gpus_per_node), workload.batch
    lines = [f"A step on {n} GPU{'s' * (n > 1)}, {nodes} node{'s' * (nodes > 1)}:"]
    text = f"compute: {images} x {workload.sample_seconds * 1e3:.4g} ms"
    if workload.fixed_seconds:
        text += f" + {workload.fixed_seconds * 1e3:.4g} ms"
    lines.append(f"{text} = {step.compute * 1e3:.1f} ms")
    lines.append(f"sync overhead: {step.sync_overhead * 1e3:.1f} ms")
    if n > 1:
        lines += explain_links(n, links)
        lines.append(explain_bucket(n, workload, links))
        lines += explain_network(workload, links, step)
    terms = [step.compute, step.sync_overhead, step.network, step.loading]
    terms = " + ".join(f"{1e3 * seconds:.1f}" for seconds in terms if seconds)
    lines.append(f"step: {terms} = {step.seconds * 1e3:.1f} ms")
    speed = f"{n * images / step.seconds:,.0f} a second"
    lines.append(f"speed: {n} x {images} / {step.seconds:.4g} s = {speed}")
    return lines


def explain_links(n, links):
    """Return the lines with the bandwidth of the links that n GPUs use."""
    lines, here = [], min(n, links.gpus_per_node)
    if here > 1:
        speed = explain_bandwidth(inside_bandwidth(here, links), "inside", links)
        lines.append(f"link of a GPU: {speed}")
        if links.shared:
            shared_by, total = links.shared
            speed = explain_bandwidth(total, "inside", links)
            lines.append(f"link that GPUs share: {speed}")
            sharing = min(here, shared_by)
            each = f"{total:.2f} / {sharing} = {total / sharing:.2f} GB/s"
            lines.append(f"each of {sharing} that share it: {each}")
    if n > links.gpus_per_node:
        speed = explain_bandwidth(links.bandwidth["between"], "between", links)
        lines.append(f"link of a node: {speed}")
    return lines


def explain_bandwidth(reached, where, links):
    """Return the GB/s that a link reaches, and their part of the data sheet's."""
    if where in links.checks:
        return f"{reached:.2f} GB/s, measured"
    efficiency = links.efficiency[where]
    return f"{reached / efficiency:g} x {efficiency:g} = {reached:.2f} GB/s"


def explain_bucket(n, workload, links):
    """Return the line with the all-reduce of a bucket."""
    size = min(BUCKET_CAP, workload.gradient_bytes)
    total = all_reduce_seconds(size, n, links)
    text = f"bucket of {size / 1e6:.1f} MB"
    where = "between" if n > links.gpus_per_node else "inside"
    if where in links.checks:
        return f"{text}: {total * 1e3:.2f} ms, from the times that check.py measured"
    name, latency, _ = all_reduce_parts(size, n, links)
    sent, bandwidth = f"2 x {n - 1}/{n}", f"{slowest_link(n, links):.2f}"
    if name == "tree":
        sent, bandwidth = "2", f"({bandwidth} x {TREE_EFFICIENCY})"
    return (
        f"{text}, {name}: {size / 1e6:.1f} x {sent} / {bandwidth} + "
        f"{latency * 1e3:.2f} = {total * 1e3:.2f} ms"
    )


def explain_network(workload, links, step):
    """Return the lines with all all-reduces, and the part that ends late."""
    total = sum(end - start for _, _, start, end in step.buckets)
    last_batch = workload.batch_seconds + step.sync_overhead
    hides = workload.overlap * links.overlap * BACKWARD * last_batch
    backward = Fraction(BACKWARD).limit_denominator(9)
    return [
        f"all {len(step.buckets)} buckets, {workload.gradient_bytes / 1e6:.1f} MB: "
        f"{total * 1e3:.1f} ms",
        f"backward pass that hides them: {links.overlap:g} x {backward} x "
        f"{last_batch * 1e3:.1f} = {hides * 1e3:.1f} ms",
        f"network: {total * 1e3:.1f} - {(total - step.network) * 1e3:.1f} hidden = "
        f"{step.network * 1e3:.1f} ms",
    ]
