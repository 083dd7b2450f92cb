"""tools/predict/: links, all-reduces and the parts of a step."""

import math
from dataclasses import replace

import pytest
from test_predict import MIB, check

import step_model
from links import (
    Links,
    all_reduce_formula,
    all_reduce_seconds,
    load_site,
    make_links,
)
from step_model import Workload, predict_step

WORKLOAD = Workload(10, 60e6, 0.01, sync_overhead=0.02)  # 0.1 s without the overhead
RING = Links({"inside": 1, "between": 1}, {"inside": 0.001, "between": 0.001})
RING = replace(RING, startup=0, has_trees=False)


def test_the_all_reduce_formula():
    """A ring of n sends 2(n-1)/n of the bytes through each link, in 2(n-1) hops."""
    for n in (2, 4, 8):
        by_hand = 2 * (n - 1) * 0.001 + 2 * (n - 1) / n
        assert all_reduce_formula(1e9, n, RING) == pytest.approx(by_hand)
    site = {"gpus_per_node": 8, "inside": {"kind": "NVLink", "gb_per_s": 100}}
    links = make_links(site | {"between": {"gb_per_s": 10, "efficiency": 1}})
    by_hand = 1.4 * (8.4e-6 + 28 * 3.4e-6 + 2 * 14e-6) + 30 / 16 / 10
    assert all_reduce_formula(1e9, 16, links) == pytest.approx(by_hand, rel=1e-9)
    tree = 8.4e-6 + 14 * 4e-6 + 2 * 7 * 14e-6 + 2 * MIB / 10e9 / 0.55
    assert all_reduce_formula(MIB, 1024, links) == pytest.approx(tree)


def test_measurements_override_the_formula():
    links = make_links(None, [check()])
    for row in check()["all_reduce"]:
        found = all_reduce_seconds(row["bytes"], 2, links)
        assert found == pytest.approx(row["seconds"])
    latency = all_reduce_formula(0, 2, links)  # Gloo's, with no start of NCCL's
    assert latency == pytest.approx(0.001 + 2**12 / 1e9)
    more = all_reduce_seconds(64 * MIB, 2, links)  # than was sent
    assert more == pytest.approx(0.001 + 64 * MIB / 1e9)
    two = all_reduce_seconds(16 * MIB, 2, links)
    four = all_reduce_seconds(16 * MIB, 4, links)
    assert 1.4 < four / two < 1.7  # 3/4 of the bytes where it was 1/2, more hops


def test_checks_of_different_groups_combine():
    """Each counts with its layout, in any order, and the slowest node."""
    small, slower = check(1, 2, "nccl"), check(1, 2, "nccl", lambda size: 1.0)
    large = check(2, 8, "nccl", lambda size: 0.002 + size / 1e10)
    links = make_links(load_site("lumi"), (large, small))
    assert links == make_links(load_site("lumi"), (small, large))
    assert all_reduce_seconds(16 * MIB, 2, links) == pytest.approx(0.017777216)
    found = all_reduce_seconds(16 * MIB, 16, links)
    assert found == pytest.approx(0.002 + 16 * MIB / 1e10)
    assert found < all_reduce_seconds(16 * MIB, 64, links) < 20 * found
    assert all_reduce_seconds(16 * MIB, 2, make_links(None, (slower, small))) == 1


def test_a_step_has_the_predicted_parts():
    """Buckets of 1 MiB, 25 MiB, ... follow one another, each when it is ready."""
    free = replace(RING, bandwidth={"between": 1e9}, hop={"inside": 0, "between": 0})
    step = predict_step(8, replace(WORKLOAD, sync_overhead=0), free)
    assert step.seconds == pytest.approx(0.1)
    sizes = [size for size, *_ in step.buckets]
    assert sizes[:3] == [MIB, 25 * MIB, 25 * MIB] and sum(sizes) == 60e6
    ready = 0.1 - 2 / 3 * 0.1 * (1 - MIB / 60e6)
    assert step.buckets[0][1] == pytest.approx(ready)
    step = predict_step(2, replace(WORKLOAD, overlap=False), RING)
    assert step.network == pytest.approx(0.06 + 4 * 2 * 0.001)
    step = predict_step(2, WORKLOAD, RING)
    assert step.network == pytest.approx(step.buckets[-1][3] - 0.12) and step.network
    alone = predict_step(1, WORKLOAD, RING)
    assert alone.seconds == pytest.approx(0.1) and alone.buckets == []
    ready = 0.12 - 2 / 3 * 0.12 * (1 - MIB / 60e6)  # stretched by the overhead
    assert step.buckets[0][1] == pytest.approx(ready)
    loading = predict_step(4, replace(WORKLOAD, loader_rate=50), RING)
    assert loading.seconds == pytest.approx(10 / 50)


def test_the_sync_overhead_depends_on_gradients_gpus_and_nodes():
    """20 us per MB, and 2 % of the compute, which grows unless it was measured."""
    work, root = replace(WORKLOAD, sync_overhead=None), math.sqrt(3)
    node, single = replace(RING, gpus_per_node=8), replace(RING, gpus_per_node=2)
    assert work.overhead_seconds(1, node) == 0
    assert work.overhead_seconds(2, node) == pytest.approx(0.0012 + 0.002)
    assert work.overhead_seconds(8, node) == pytest.approx(0.0012 + 0.002 * root)
    assert work.overhead_seconds(8, single) == pytest.approx(0.0012 + 0.004 * root)
    grown = 0.02 + 0.002 * (root - 1)
    assert WORKLOAD.overhead_seconds(8, single) == pytest.approx(grown)


def test_a_measured_overhead_narrows_the_range():
    links = make_links(load_site("h100-ndr"))
    wide = step_model.best_and_worst(8, replace(WORKLOAD, sync_overhead=None), links)
    narrow = replace(WORKLOAD, sync_overhead=0.0032)  # the same on two
    narrow = step_model.best_and_worst(8, narrow, links)
    assert wide[0].seconds < narrow[0].seconds < narrow[1].seconds < wide[1].seconds
