"""tools/predict/: the model, its inputs and its errors."""

import json
import re

import pytest
from conftest import REPOSITORY, call, raises_user_error

import predict
import step_model
import validate
from links import (
    load_site,
    make_links,
    slowest_link,
)
from step_model import Workload, predict_step

MIB = 2**20
FOLDER = REPOSITORY / "tools/predict"
README = (FOLDER / "README.md").read_text()
ONE, TWO = "pytorch_dvc_cnn_pretrained", "pytorch_dvc_cnn_pretrained_multigpu"


def check(nodes=2, here=1, backend="gloo", seconds=lambda size: 0.001 + size / 1e9):
    """Return check.py's results for nodes with `here` processes each."""
    row = {"over": "all", "nodes": nodes, "processes": nodes * here}
    sizes = 2**12, 2**16, MIB, 16 * MIB
    rows = [row | {"bytes": size, "seconds": seconds(size)} for size in sizes]
    return {"backend": backend, "all_reduce": rows}


def result(script, gpus, batch, seconds, **more):
    """Return a line of results.jsonl of a run whose steps take these seconds."""
    options = {"epochs": 2, "batch_size": batch, "seed": 0}
    run = {"script": script, "gpus": gpus, "nodes": 1, "device": "CPU core"}
    run |= {"options": options, "unit": "images", "per_epoch": 20000}
    run |= {"epoch_seconds": [20000 / batch / gpus * seconds] * 2, "epoch_ends": [5]}
    run |= {"cpu": "Xeon", "cpus": 64, "gradient_bytes": 40_000_000}
    return json.dumps(run | more) + "\n"


@pytest.fixture
def runs_folder(tmp_path, monkeypatch):
    """Return a folder with runs on one and two GPUs, and checks of 1 and 2 nodes."""
    monkeypatch.chdir(tmp_path)
    one = result(ONE, 1, 25, 0.1)
    lines = one + result(ONE, 1, 50, 0.19) + result(TWO, 2, 25, 0.13)
    checks = {"here": check(1, 2), "two": check(2, 1)}
    checks["slow"] = check(2, 1, seconds=lambda size: 0.001 + size / 2e7)
    for name, content in checks.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    (tmp_path / "one.jsonl").write_text(one)
    (tmp_path / "results.jsonl").write_text(lines)
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


def test_a_mesh_has_fewer_links_between_fewer_gpus():
    inside = {
        "kind": "NVLink",
        "gb_per_s": 150,
        "gb_per_s_up_to": {"2": 25, "4": 100},
    }
    site = {"gpus_per_node": 8, "inside": inside}
    speeds = [slowest_link(n, make_links(site)) for n in (2, 3, 4, 8)]
    assert speeds == pytest.approx([20, 80, 80, 120])


def test_the_fewest_gpus_may_be_eight(runs_folder, tables):
    """A prediction for them is what was measured."""
    (runs_folder / "eight.jsonl").write_text(result(TWO, 8, 25, 0.13))
    weak, _, out = tables("eight.jsonl", "--site", "h100-ndr", "--gpus", 16)
    assert weak[3].split()[:4] == ["8", "1", "200", "130"]
    assert 100 < float(weak[0].split()[3]) < 130
    assert "Measured: the speed on 8.\n" in out


def test_a_slow_host_gets_a_warning(runs_folder, capsys):
    """LUMI's ResNet-50 has 531 images/s."""
    options = ["--site", "lumi", "--model", "resnet50", "--speed"]
    call(predict, *options, 200)
    warning = "Warning: a step takes 2.7 times as long as at ResNet-50's FLOP/s"
    assert capsys.readouterr().err.startswith(warning)
    call(predict, *options, 400)
    assert capsys.readouterr().err == ""


def test_tables_from_runs_and_checks(runs_folder, tables):
    """The sync overhead is the extra time of a step on two GPUs of a node."""
    weak, strong, out = tables("results.jsonl", "--check", "here.json", "two.json")
    workload = Workload(25, 40e6, 0.0036, 0.01)
    one_node = make_links(None, [check(1, 2)])
    workload = step_model.fit("sync_overhead", 0.13, 2, workload, one_node)
    assert predict_step(2, workload, one_node).seconds == pytest.approx(0.13)
    two_nodes = make_links(None, [check(2, 1)])
    step = predict_step(2, workload, two_nodes)
    assert "Weak scaling, 25 per GPU" in out and "Strong scaling, 25 in total" in out
    rows = [line.split() for line in weak[:-2]]
    assert [int(row[0]) for row in rows] == [2**i for i in range(10)]
    assert rows[0][3] == "100" and rows[1][3] == f"{1e3 * step.seconds:.4g}"
    assert rows[1][6] == f"{0.1 / step.seconds:.0%}"
    assert weak[-2] == "Worth it up to 64 GPUs: 128 are 1.24 times as fast."
    grown = 1e3 * workload.overhead_seconds(128, two_nodes)
    assert f"(10.00 of it fixed), sync overhead {grown:.2f}" in weak[-1]
    assert [line.split()[0] for line in strong[:-2]] == ["1", "2", "4", "8", "16"]


def test_network_or_loading_bounds_the_step(runs_folder, tables):
    weak, *_ = tables("one.jsonl", "--check", "slow.json")
    assert weak[-2].startswith("Worth it up to 1 GPU: 2 are 0.")
    assert float(re.search(r"network (\S+), loading 0.00", weak[-1])[1]) > 100
    weak, *_ = tables("one.jsonl", "--site", "h100-ndr", "--loader-rate", 100)
    assert float(re.search(r"loading (\S+)\.", weak[-1])[1]) > 20
    weak, _, out = tables("one.jsonl", "--check", "here.json", "--gpus", 16)
    assert out.startswith("No links between nodes are known; add a --check of two")
    assert [line.split()[0] for line in weak[:-2]] == ["1", "2"]


def test_the_newest_matching_runs_count(runs_folder):
    """The newest run on two GPUs, its baseline, and other batches of that script."""
    old, new = {"epoch_ends": [4]}, {"epoch_ends": [6]}
    fast = {"options": {"epochs": 2, "batch_size": 25, "lr": 1}}
    lines = [
        result("cinic", 1, 25, 0.5),
        result("cinic_amp", 1, 25, 0.2, **new),
        result("cinic_amp", 1, 25, 0.11, **fast),
        result("cinic_tensorboard", 1, 25, 0.1),
        result("cinic_ddp", 2, 25, 0.9, **old, **fast),
        result("cinic_ddp", 2, 25, 0.12, **new),
    ]
    (runs_folder / "cinic.jsonl").write_text("".join(lines))
    links = make_links(None, [check(1, 2)])
    found = predict.measured_workload(["cinic.jsonl"], links)
    workload, images, unit, speedups, runs = found
    assert speedups[-1] == ("25 per GPU", 2, pytest.approx(0.1 / 0.12 * 2))
    assert (workload.fixed_seconds, images, unit) == (0, 20000, "images")
    assert workload.sample_seconds == pytest.approx(0.1 / 25)
    assert predict_step(2, workload, links).seconds == pytest.approx(0.12)
    assert [run["script"] for run in runs] == ["cinic_tensorboard", "cinic_ddp"]
    # Each process has all data, and takes two steps for one.
    lines = result("single", 1, 25, 0.1), result("ddp_unfinished", 2, 25, 0.2)
    (runs_folder / "single.jsonl").write_text("".join(lines))
    *_, runs = predict.measured_workload(["single.jsonl"], links)
    assert [run["script"] for run in runs] == ["single"]


def test_the_plot_has_predicted_and_measured_speed_ups(runs_folder, monkeypatch):
    drawn, draw = [], predict.draw_predictions
    keep = lambda tables: drawn.append(draw(tables)) or drawn[0]  # noqa: E731
    monkeypatch.setattr(predict, "draw_predictions", keep)
    options = "--check", "here.json", "two.json", "--gpus", 4, "--plot", "new/p.png"
    call(predict, "results.jsonl", *options)
    assert (runs_folder / "new/p.png").read_bytes().startswith(b"\x89PNG")
    weak, strong = drawn[0].axes
    lines = {line.get_label(): line.get_xydata() for line in weak.lines}
    assert lines["measured"].tolist() == [[2, pytest.approx(2 * 0.1 / 0.13)]]
    # The sync overhead is fitted to the run on two.
    assert lines["predicted"][1] == pytest.approx(lines["measured"][0], rel=0.03)
    assert lines["predicted"][2][1] < lines["ideal"][2][1] == 4
    assert "measured" not in [line.get_label() for line in strong.lines]


def test_cpu_cores_get_a_warning(runs_folder, capsys):
    """They have no GPU hours. The runs are printed."""
    call(predict, "results.jsonl", "--site", "lumi")
    out, err = capsys.readouterr()
    first = f"From {ONE} on 1 x CPU core, batch 25\nFrom {TWO} on 2 x "
    assert out.startswith(first) and "kWh" not in out
    assert err.startswith("Warning: this predicts more CPU cores like those")


def test_gpus_and_batches_are_limited(runs_folder, tables):
    for most in ("1", "3", "48"):
        weak, *_ = tables("one.jsonl", "--site", "lumi", "--gpus", most)
        assert weak[-3].split()[0] == most
        assert weak[-2].startswith(f"Worth it up to {most} GPU")
    few = result(ONE, 1, 2, 0.1) + result(ONE, 1, 25, 0.1, per_epoch=200)
    (runs_folder / "few.jsonl").write_text(few)
    weak, *_ = tables("few.jsonl", "--site", "lumi")
    assert weak[-3].split()[:3] == ["8", "1", "200"]  # an epoch is one step
    assert weak[-2] == "Worth it up to 8 GPUs: more GPUs would have no images."


def test_sequences_are_counted_as_tokens(runs_folder, tables):
    options = {"epochs": 2, "batch_size": 16, "length": 64, "seed": 0}
    more = {"options": options, "unit": "tokens", "per_epoch": 64 * 1024}
    line = result("single", 1, 16, 0.1, **more, epoch_seconds=[6.4])
    (runs_folder / "tokens.jsonl").write_text(line)
    weak, _, out = tables("tokens.jsonl", "--site", "lumi")
    assert "sequences/s" in out and weak[0].split()[:4] == ["1", "1", "16", "100"]


def test_each_site_has_sources(tables, runs_folder):
    """And its table is complete."""
    for file in sorted(FOLDER.glob("sites/*.json")):
        site = json.loads(file.read_text())
        for part in {"inside", "between", "watts", "resnet50"} & site.keys():
            assert site[part]["source"].startswith("https://"), (file, part)
        options = "--gpus", 64, "--speed", 100, "--gradient-mb", 102
        weak, *_ = tables("--site", file.stem, *options)
        last = 64 if "between" in site else site["gpus_per_node"]
        assert weak[-3].split()[0] == str(last) and f"`{file.stem}`" in README


def test_an_unmeasured_model_is_as_fast_as_its_arithmetic():
    """VGG16 has 15.5 billion multiplications an image, ResNet-50 4.1."""
    flop, parameters = predict.count_flop("vgg16")
    seconds = predict.arithmetic_seconds(flop, {"resnet50": {"fp32": 100}})
    assert seconds == pytest.approx(15.5 / 4.1 / 100, rel=0.02)
    assert parameters == 138_357_544


def test_speed_and_gradients_are_enough(runs_folder, tables):
    """The defaults are batches of 32 images, and epochs of ImageNet."""
    options = "--speed", 100, "--gradient-mb", 440, "--gpus", 16
    weak, *_ = tables("--site", "lumi", *options)
    links = make_links(load_site("lumi"))
    step = predict_step(16, Workload(32, 440e6, 0.01), links)
    assert (
        weak[0].split()[2:4] == ["32", "320"] and weak[0].split()[-3] == "1.281e+04"
    )
    hours = 1281167 / 100 / 3600
    assert weak[0].split()[-2:] == [f"{hours:.3g}", f"{hours * 280 / 1e3:.3g}"]
    assert weak[-3].split()[3] == f"{1e3 * step.seconds:.4g}"


def test_user_errors(runs_folder):
    (runs_folder / "two.jsonl").write_text(result("ddp_unfinished", 2, 25, 0.1))
    steps = {"epochs": 2, "batch_size": 25, "steps": 6}
    (runs_folder / "steps.jsonl").write_text(result(ONE, 1, 25, 0.1, options=steps))
    shared = result(TWO, 2, 25, 0.1, gpus_shared=1)
    (runs_folder / "shared.jsonl").write_text(shared)
    (runs_folder / "shared.json").write_text(
        json.dumps(check() | {"gpus_shared": 1})
    )
    for words, options in [
        ("no network; add --check FILE", "one.jsonl"),
        ("no runs; add a file, --model", "--site lumi --speed 5"),
        ("no site nowhere; .* a100-hdr, alvis", "one.jsonl --site nowhere"),
        ("these runs had --steps", "steps.jsonl --site lumi"),
        ("no run on one GPU", "two.jsonl --site lumi"),
        ("no run with a GPU for each rank", "shared.jsonl --site lumi"),
        ("in shared.json several ranks shared", "one.jsonl --check shared.json"),
    ]:
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
        assert re.search(rf"^\| {name} \|.* {re.escape(cells)} \|$", README, re.M), (
            name
        )
    off = {name for name in re.findall(r"^[+-]\d+ %: (.*?), ", out, re.M)}
    assert off and {f"`{name}`" for name in off} <= {*re.findall("`.*?`", README)}
