"""tools/predict/: links, all-reduces, the parts of a step, and the tables."""

import json
import re
from dataclasses import replace

import pytest
from conftest import REPOSITORY, call, raises_user_error

import predict
import validate
from links import (
    Links,
    all_reduce_formula,
    all_reduce_seconds,
    load_site,
    make_links,
)
from step_model import MIB, Workload, best_and_worst, predict_step

FOLDER = REPOSITORY / "tools/predict"
README = (FOLDER / "README.md").read_text()
SINGLE, MULTI = "pytorch_dvc_cnn_pretrained", "pytorch_dvc_cnn_pretrained_multigpu"
WORKLOAD = Workload(10, 60e6, 0.01, sync_overhead=0.02)  # 0.1 s without the overhead
RING = Links({"inside": 1, "between": 1}, {"inside": 0.001, "between": 0.001})
RING = replace(RING, startup=0, has_trees=False)


def check(nodes=2, here=1, seconds=lambda size: 0.001 + size / 1e9):
    """Return check.py's results for nodes with `here` processes each."""
    row = {"over": "all", "nodes": nodes, "processes": nodes * here}
    sizes = 2**12, 2**16, MIB, 16 * MIB
    rows = [row | {"bytes": size, "seconds": seconds(size)} for size in sizes]
    return {"backend": "gloo", "all_reduce": rows}


def result(script, gpus, seconds, batch=25, **more):
    """Return a line of results.jsonl of a run whose steps take these seconds."""
    options = {"epochs": 2, "batch_size": batch, "seed": 0}
    run = {"script": script, "gpus": gpus, "nodes": 1, "device": "CPU core"}
    run |= {"options": options, "unit": "images", "per_epoch": 20000}
    run |= {"epoch_seconds": [20000 / batch / gpus * seconds] * 2, "epoch_ends": [5]}
    run |= {"cpu": "Xeon", "cpus": 64, "gradient_bytes": 40_000_000}
    return json.dumps(run | more) + "\n"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Return a folder with runs on one and two GPUs, and checks of 1 and 2 nodes."""
    monkeypatch.chdir(tmp_path)
    one = result(SINGLE, 1, 0.1)
    (tmp_path / "one.jsonl").write_text(one)
    more = result(SINGLE, 1, 0.19, batch=50) + result(MULTI, 2, 0.13)
    (tmp_path / "results.jsonl").write_text(one + more)
    checks = {"here": check(1, 2), "two": check(2, 1)}
    checks["slow"] = check(2, 1, seconds=lambda size: 0.001 + size / 2e7)
    for name, content in checks.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    return tmp_path


@pytest.fixture
def tables(capsys):
    """Return a function that runs predict.py: both tables, and the output."""

    def tables(*options):
        call(predict, *options)
        out = capsys.readouterr().out
        parts = out.split("scaling, ")[1:]
        return *(part.split("\n\n")[0].splitlines()[2:] for part in parts), out

    return tables


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
    more = all_reduce_seconds(64 * MIB, 2, links)  # than was sent
    assert more == pytest.approx(0.001 + 64 * MIB / 1e9)
    two = all_reduce_seconds(16 * MIB, 2, links)
    four = all_reduce_seconds(16 * MIB, 4, links)
    assert 1.4 < four / two < 1.7  # 3/4 of the bytes where it was 1/2, more hops


def test_the_slowest_of_several_nodes_counts():
    checks = check(1, 2), check(1, 2, seconds=lambda size: 1.0)
    for links in (make_links(None, checks), make_links(None, checks[::-1])):
        assert all_reduce_seconds(16 * MIB, 2, links) == 1


def test_a_step_has_the_predicted_parts():
    """Buckets of 1 MiB, 25 MiB, ... follow one another, each when it is ready."""
    step = predict_step(2, WORKLOAD, RING)
    sizes = [size for size, *_ in step.buckets]
    assert sizes[:3] == [MIB, 25 * MIB, 25 * MIB] and sum(sizes) == 60e6
    ready = 0.12 - 2 / 3 * 0.12 * (1 - MIB / 60e6)  # the backward pass is 2/3
    assert step.buckets[0][1] == pytest.approx(ready)
    assert step.network == pytest.approx(step.buckets[-1][3] - 0.12) and step.network
    step = predict_step(2, replace(WORKLOAD, overlap=False), RING)
    assert step.network == pytest.approx(0.06 + 4 * 2 * 0.001)
    free = replace(RING, bandwidth={"between": 1e9}, hop={"inside": 0, "between": 0})
    step = predict_step(8, replace(WORKLOAD, sync_overhead=0), free)
    assert step.seconds == pytest.approx(0.1)
    alone = predict_step(1, WORKLOAD, RING)
    assert alone.seconds == pytest.approx(0.1) and alone.buckets == []
    loading = predict_step(4, replace(WORKLOAD, loader_rate=50), RING)
    assert loading.seconds == pytest.approx(10 / 50)


def test_a_measured_overhead_narrows_the_range():
    links = make_links(load_site("h100-ndr"))
    wide = best_and_worst(8, replace(WORKLOAD, sync_overhead=None), links)
    narrow = replace(WORKLOAD, sync_overhead=0.0032)  # the same on two
    narrow = best_and_worst(8, narrow, links)
    assert wide[0].seconds < narrow[0].seconds < narrow[1].seconds < wide[1].seconds


def test_tables_from_runs_and_checks(folder, tables):
    """The sync overhead is the extra time of a step on two GPUs of a node."""
    options = "--check", "here.json", "two.json", "--plot", "new/plot.png"
    weak, strong, out = tables("results.jsonl", *options)
    assert (folder / "new/plot.png").read_bytes().startswith(b"\x89PNG")
    one_node = make_links(None, [check(1, 2)])
    workload, *_ = predict.measured_workload(["results.jsonl"], one_node)
    assert workload.fixed_seconds == pytest.approx(0.01)  # 0.19 = 0.01 + 2 x 0.09
    assert predict_step(2, workload, one_node).seconds == pytest.approx(0.13)
    step = predict_step(2, workload, make_links(None, [check(2, 1)]))
    assert out.startswith(
        f"From {SINGLE} on 1 x CPU core, batch 25\nFrom {MULTI} on"
    )
    assert "Weak scaling, 25 per GPU" in out and "Strong scaling, 25 in total" in out
    rows = [line.split() for line in weak[:-2]]
    assert [int(row[0]) for row in rows] == [2**i for i in range(10)]
    assert rows[0][3] == "100" and rows[1][3] == f"{1e3 * step.seconds:.4g}"
    assert rows[1][6] == f"{0.1 / step.seconds:.0%}"
    assert weak[-2] == "Worth it up to 64 GPUs: 128 are 1.24 times as fast."
    assert [line.split()[0] for line in strong[:-2]] == ["1", "2", "4", "8", "16"]
    # Known without a run on one GPU, a prediction for the fewest is the measurement.
    (folder / "eight.jsonl").write_text(result(MULTI, 8, 0.13))
    weak, _, out = tables("eight.jsonl", "--site", "h100-ndr", "--gpus", 16)
    assert weak[3].split()[:4] == ["8", "1", "200", "130"]
    assert 100 < float(weak[0].split()[3]) < 130


def test_network_or_loading_bounds_the_step(folder, tables):
    weak, *_ = tables("one.jsonl", "--check", "slow.json")
    assert weak[-2].startswith("Worth it up to 1 GPU: 2 are 0.")
    assert float(re.search(r"network (\S+), loading 0.00", weak[-1])[1]) > 100
    weak, *_ = tables("one.jsonl", "--site", "h100-ndr", "--loader-rate", 100)
    assert float(re.search(r"loading (\S+)\.", weak[-1])[1]) > 20


def test_the_newest_run_on_two_gpus_and_its_baseline_count(folder):
    old = {"options": {"epochs": 2, "batch_size": 25, "lr": 1}, "epoch_ends": [4]}
    lines = result("cinic", 1, 0.5) + result("cinic_amp", 1, 0.1)
    lines += result("cinic_ddp", 2, 0.12) + result("cinic_ddp", 2, 0.9, **old)
    (folder / "cinic.jsonl").write_text(lines)
    links = make_links(None, [check(1, 2)])
    workload, images, _, speedups, runs = predict.measured_workload(
        ["cinic.jsonl"], links
    )
    assert [run["script"] for run in runs] == ["cinic_amp", "cinic_ddp"]
    assert workload.sample_seconds == pytest.approx(0.1 / 25) and images == 20000
    assert predict_step(2, workload, links).seconds == pytest.approx(0.12)
    assert speedups[-1] == ("25 per GPU", 2, pytest.approx(0.1 / 0.12 * 2))


def test_gpus_are_limited_by_options_links_and_images(folder, tables):
    weak, *_ = tables("one.jsonl", "--site", "lumi", "--gpus", 48)
    assert weak[-3].split()[0] == "48"
    weak, _, out = tables("one.jsonl", "--check", "here.json")
    assert out.startswith("No links between nodes are known; add a --check of two")
    assert weak[-3].split()[0] == "2"
    (folder / "few.jsonl").write_text(result(SINGLE, 1, 0.1, per_epoch=200))
    weak, *_ = tables("few.jsonl", "--site", "lumi")
    assert weak[-3].split()[:3] == ["8", "1", "200"]  # an epoch is one step
    assert weak[-2] == "Worth it up to 8 GPUs: more GPUs would have no images."


def test_sequences_are_counted_as_tokens(folder, tables):
    options = {"epochs": 2, "batch_size": 16, "length": 64, "seed": 0}
    more = {"options": options, "unit": "tokens", "per_epoch": 64 * 1024}
    line = result("single", 1, 0.1, batch=16, epoch_seconds=[6.4], **more)
    (folder / "tokens.jsonl").write_text(line)
    weak, _, out = tables("tokens.jsonl", "--site", "lumi")
    assert "sequences/s" in out and weak[0].split()[:4] == ["1", "1", "16", "100"]


def test_every_site_has_sources_and_a_table(tables):
    for file in sorted(FOLDER.glob("sites/*.json")):
        site = json.loads(file.read_text())
        for part in {"inside", "between", "watts", "resnet50"} & site.keys():
            assert site[part]["source"].startswith("https://"), (file, part)
        options = "--gpus", 64, "--speed", 100, "--gradient-mb", 102
        weak, *_ = tables("--site", file.stem, *options)
        last = 64 if "between" in site else site["gpus_per_node"]
        assert weak[-3].split()[0] == str(last) and f"`{file.stem}`" in README


def test_a_model_or_a_speed_is_enough(tables):
    """VGG16 has 15.5 billion multiplications an image, ResNet-50 4.1."""
    flop, parameters = predict.count_flop("vgg16")
    seconds = predict.arithmetic_seconds(flop, {"resnet50": {"fp32": 100}})
    assert seconds == pytest.approx(15.5 / 4.1 / 100, rel=0.02)
    assert parameters == 138_357_544
    weak, *_ = tables("--site", "lumi", "--speed", 100, "--gradient-mb", 440)
    hours = 1281167 / 100 / 3600  # an epoch of ImageNet, at 280 W
    cells = weak[0].split()
    assert cells[2:4] == ["32", "320"]  # ms
    assert cells[-2:] == [f"{hours:.3g}", f"{hours * 280 / 1e3:.3g}"]


@pytest.mark.parametrize(
    "words, options",
    [
        ("no network; add --check FILE", "one.jsonl"),
        ("no runs; add a file, --model", "--site lumi --speed 5"),
        ("no site nowhere; .* a100-hdr, alvis", "one.jsonl --site nowhere"),
        ("no run on one GPU", "unfinished.jsonl --site lumi"),
        ("no run with a GPU for each rank", "shared.jsonl --site lumi"),
        ("in shared.json several ranks shared", "one.jsonl --check shared.json"),
    ],
)
def test_user_errors(words, options, folder):
    (folder / "unfinished.jsonl").write_text(result("ddp_unfinished", 2, 0.1))
    (folder / "shared.jsonl").write_text(result(MULTI, 2, 0.1, gpus_shared=1))
    (folder / "shared.json").write_text('{"all_reduce": [1], "gpus_shared": 1}')
    with raises_user_error(words):
        call(predict, *options.split())


def test_the_readme_has_the_figures_of_validate(capsys):
    call(validate, "--off", 30)
    out = capsys.readouterr().out
    parts = re.findall(r"^from fewest: .*\n((?:.*\n)*?)\n", out, re.M)
    line = r"^(.*?)  +([\d.]+) +([+-]\d+) +(\d+) \| (\d+ of \d+) \| ([\d.]+)$"
    rows = re.findall(line, "".join(parts), re.M)
    assert len(rows) == 12
    for name, middle, *cells in rows:
        cells = f"{middle} % | {cells[0]} % | " + " | ".join(cells[1:])
        row = rf"^\| {name} \|.* {re.escape(cells)} \|$"
        assert re.search(row, README, re.M), name
    off = {name for name in re.findall(r"^[+-]\d+ %: (.*?), ", out, re.M)}
    assert off and {f"`{name}`" for name in off} <= {*re.findall("`.*?`", README)}
