"""compare.py with results.py, and mfu.py."""

import csv
import json
import re
import sys

import pytest
from conftest import REPOSITORY, fails, raises_user_error, run

from compare import compare, describe, make_table, print_table
from results import parse_run, read_runs
from speedup_plot import MAX_LINES, draw_speedups

NAME = "pytorch_dvc_cnn_pretrained"
EPYC = {"device": "CPU core", "cpu": "AMD EPYC", "cpus": 2}


def result(script, gpus, speed, batch=25, **fields):
    """Return a run as RunLog writes it; unknown fields are options."""
    options = {
        "epochs": 10,
        "batch_size": batch,
        "backbone": "tinyvgg",
        "workers": 1,
    }
    run = {
        "script": script,
        "gpus": gpus,
        "nodes": 1,
        "device": "H200",
        "cpu": "Xeon",
    }
    run |= {"cpus": 64, "unit": "images", "per_epoch": 2000, "torch": "2.15.0"}
    seconds = fields.get("per_epoch", 2000) / speed
    run["epoch_seconds"] = [seconds] * fields.get("epochs", 10)
    run["epoch_ends"] = [1.0]
    run |= {"training_seconds": 10, "accuracy": 90.0, "peak_memory_gb": 2.0}
    run |= {"gradient_bytes": None, "profiled": False, "gpus_shared": None}
    for name, value in fields.items():
        where = run if name in {*run, "tensorflow"} else options
        where[name] = value
    return run | {"options": options}


def rows_of(*runs):
    """Return the rows of all titles."""
    return [row for rows in compare(map(parse_run, runs)).values() for row in rows]


def speedups(*runs):
    return [(row["script"], row["gpus"], row["speedup"]) for row in rows_of(*runs)]


def test_each_run_is_compared_with_its_counterpart_on_one_gpu():
    small = [
        result(f"{NAME}_multigpu", 8, 700),
        result(f"{NAME}_multigpu", 2, 180),
        result(NAME, 1, 90, batch=24),
        result(NAME, 1, 100),
        result("strong_scaling", 2, 135, batch=12),
        result(f"{NAME}_multigpu", 2, 300, batch=64),  # none on one had 64 or 128
    ]
    large = [result(f"{NAME}_largedata", 1, 50, per_epoch=22000)]
    large += [result(f"{NAME}_largedata_multigpu", 4, 100, per_epoch=22000, nodes=2)]
    cpu = result(NAME, 1, 3, **EPYC)
    groups = compare([parse_run(run) for run in [*small, *large, cpu]])
    found = {title.split(", ", 3)[3]: rows for title, rows in groups.items()}
    assert {
        title: [r["speedup"] for r in rows] for title, rows in found.items()
    } == {
        "CPU core, 2 x AMD EPYC, 2000 images an epoch": [1],
        "H200, 2000 images an epoch": [1, 1, None, 1.8, 1.5, 7],
        "H200, 22000 images an epoch": [1, 2],
    }
    assert found["H200, 22000 images an epoch"][1]["efficiency"] == 0.5
    # Context parallelism on one GPU is no baseline.
    context = speedups(result("context_parallel", 1, 100), result("ddp", 2, 150))
    assert context == [("context_parallel", 1, None), ("ddp", 2, None)]


def test_the_baseline_is_the_best_match():
    """For strong scaling that with the global batch; never DDP on one GPU."""
    strong = result("strong_scaling", 8, 800)
    whole = result(NAME, 1, 160, batch=200)
    *_, row = rows = rows_of(result(NAME, 1, 100), whole, strong)
    assert (row["speedup"], row["base_batch"]) == (5, "200 in total")
    header, *lines = make_table(rows)[0]
    shown = [line[header.index("baseline")] for line in lines]
    assert sorted(shown) == ["", "", "200 in total"]
    for script in (f"{NAME}_multigpu", "strong_scaling"):
        assert speedups(result(script, 1, 90)) == [(script, 1, None)]
    cpu = [result("mnist_multigpu", 1, 120, **EPYC)]  # DataParallel on one core
    cpu += [result("mnist_singlegpu", 1, 100, **EPYC)]
    cpu += [result("mnist_ddp", 8, 200, **EPYC)]
    assert [row[1:] for row in speedups(*cpu)] == [(1, 1.2), (1, 1), (8, 2)]
    steps = result("train_ddp_cifar100", 2, 150, steps=9, per_epoch=900)
    one = result("train_cifar100", 1, 100, steps=20, per_epoch=1000)
    assert [row[2] for row in speedups(one, steps)] == [1, 1.5]
    one = result(NAME, 1, 130, epochs=1, lr=2), result(NAME, 1, 120, lr=1)
    two = result(f"{NAME}_multigpu", 2, 150)
    assert speedups(*one, two)[-1][2] == pytest.approx(1.25)  # epoch 1 is slow


def test_a_students_script_is_compared_with_its_original():
    two = result("my_ddp", 2, 150)
    rows = speedups(result("single", 1, 100), result("ddp", 2, 120), two)
    assert [row[2] for row in rows] == [1, 1.5, 1.2]
    other = result("my_ddp", 2, 150, length=64)  # of another exercise
    assert ("my_ddp", 2, None) in speedups(result("single", 1, 100), other)


def test_amp_is_compared_with_amp():
    ddp, single = result("cinic_ddp", 2, 190), result("cinic", 1, 50)
    amp = result("cinic_amp", 1, 100)
    assert speedups(single, amp, ddp)[-1] == ("cinic_ddp", 2, 1.9)
    assert speedups(single, ddp)[-1] == ("cinic_ddp", 2, None)


BUSY = f"efficiency 106%, so the machine was busy: repeat {NAME} on"


@pytest.mark.parametrize(
    "note, speedup, one, two",
    [
        ("", 1.5, {}, {"lr": 1, "seed": 3, "optimizer": "adam"}),
        ("no run on one GPU .* batch 7 or 14 and", None, {}, {"batch": 7}),
        ("no run on one GPU", None, EPYC | {"cpus": 8}, EPYC),
        ("no run on one GPU", None, {"workers": 2}, {}),
        ("no run on one GPU", None, {"torch": "2.8"}, {}),
        ("no run on one GPU", None, {}, {"profiled": True}),
        (
            "^ran 2 of 10 epochs: stopped",
            1.5,
            {},
            {"epoch_seconds": 2 * [2000 / 150]},
        ),
        ("^only one epoch: the first", 1.5, {}, {"epochs": 1}),
        (BUSY, 2.12, {"epoch_seconds": 10 * [2000 / 150 * 2.12]}, {}),
    ],
)
def test_unusual_runs_have_notes(note, speedup, one, two):
    runs = result(NAME, 1, 100, **one), result(f"{NAME}_multigpu", 2, 150, **two)
    *_, row = sorted(rows_of(*runs), key=lambda row: row["gpus"])
    assert row["speedup"] == pytest.approx(speedup)
    assert len(row["notes"]) == bool(note)
    assert re.search(note, " ".join(row["notes"]))


def test_the_table_has_a_row_per_command():
    """It shows the median of repeats; options that differ are columns."""
    same = {"image_size": 40, "amp": True, "weights": None, "lr": 1}
    runs = [result(NAME, 1, n, accuracy=n, **same) for n in (80, 110, 60)]
    runs += [result(f"{NAME}_multigpu", 2, 150, nodes=n, **same) for n in (1, 2)]
    runs += [result(NAME, 1, 30, **same | {"backbone": "vgg16"})]
    runs += [result(f"{NAME}_multigpu", 2, 45, **same | {"backbone": "vgg16"})]
    runs[-1]["options"] |= {"lr": 2, "of_one_script": "x"}
    runs[-1]["accuracy"] = None
    ((title, rows),) = compare([parse_run(run) for run in runs]).items()
    options = "workers 1, image_size 40, amp True"
    assert title == f"{NAME}, {options}, H200, 2000 images an epoch"
    (head, *lines), (busy, none) = make_table(rows)
    names = ["memory", "runs", "spread", "note", "backbone", "lr", "of_one_script"]
    assert list(head[-7:]) == names
    assert busy.startswith("spread 83%, so the machine was busy: repeat")
    assert none.startswith("no speed-up: no run on one GPU")
    lines = [" ".join(" ".join(line).split()) for line in lines]
    one = "1 1 25 25 80.0 1.00 100% 10.0 s 80.00 % 2.00 GB 3 83% 1 "
    assert len(lines) == 5 and lines[0] == f"{NAME} {one}tinyvgg 1"
    two = "2 1 25 50 45.0 10.0 s 2.00 GB 1 0% 2 vgg16 2 x"
    assert lines[-1] == f"{NAME}_multigpu {two}"


@pytest.mark.parametrize(
    "speeds, shown, busy",
    [
        ([40, 120], 120, True),  # which was disturbed? a third run will tell
        ([120, 40], 120, True),
        ([100, 120], 120, False),
        ([40, 120, 124], 120, False),
        ([40, 44, 120], 44, True),
        ([90, 100, 110, 120], 110, False),
    ],
)
def test_repeats_replace_a_run_on_a_busy_machine(speeds, shown, busy):
    """The row is the median run, of two the faster; a note asks for another run."""
    runs = [result(NAME, 1, n, seed=n) for n in speeds]
    (row,) = rows_of(*runs)
    assert (round(row["speed"]), row["runs"]) == (shown, len(speeds))
    assert row["spread"] == pytest.approx(max(speeds) / min(speeds) - 1)
    assert [note.partition(",")[0] for note in row["notes"]] == [
        f"spread {row['spread']:.0%}"
    ] * busy


def draw(runs):
    """Return the figure of these runs."""
    return draw_speedups(compare(map(parse_run, runs)), describe)


def test_ranks_that_share_a_gpu_have_no_speedup():
    """And are no repeat of a run with a GPU for each rank."""
    shared = result(f"{NAME}_multigpu", 2, 150, gpus_shared=1)
    runs = [result(NAME, 1, 100), shared, result(f"{NAME}_multigpu", 2, 190)]
    one, two, ranks = rows_of(*runs)
    assert [row["speedup"] for row in (one, two, ranks)] == [1, 1.9, None]
    assert (ranks["efficiency"], ranks["runs"]) == (None, 1)
    (note,) = ranks["notes"]
    assert note.startswith("no speed-up: 2 ranks on 1 H200 take turns")
    lines, _ = make_table([one, two, ranks])
    assert [line[1] for line in lines] == ["GPUs", "1", "2", "2 ranks on 1 H200"]
    axes, _ = draw(runs[:2]).axes
    assert [list(line.get_xdata()) for line in axes.lines] == [[1, 1]]  # ideal


def test_tables_fit_160_columns(capsys):
    """Columns that do not fit follow below, and each line names its script."""
    lines = [["script", *(f"option_{i}" for i in range(30))]]
    lines += [[NAME, *("x" * 20 for _ in range(30))] for _ in range(2)]
    print_table(lines, ["word " * 60])
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= 160
    first, *more = printed.split("\n\n")
    assert len(more) == 4
    for part in (first, *more):
        assert [line.split()[0] for line in part.splitlines()[:3]] == [
            *("script", NAME, NAME)
        ]
    assert re.findall(r"option_\d+", printed) == lines[0][1:]
    assert printed.count("word") == 60 and printed.count("x" * 20) == 60
    print_table([["wide"], ["x" * 200]], [])  # whatever the width, it is shown
    assert capsys.readouterr().out.splitlines()[1] == "x" * 200


def test_the_plot_has_a_line_per_configuration():
    """And a dot per run, the ideal speed-up, and the efficiency on the right."""
    runs = [result(NAME, 1, 80), result(NAME, 1, 90)]
    runs += [result(f"{NAME}_multigpu", gpus, 90 * gpus) for gpus in (8, 2, 4, 2)]
    runs += [result(f"{NAME}_multigpu", 4, 180, nodes=2)]
    axes, right = draw(runs).axes
    dots, curves = {}, []
    for line in axes.lines:
        points = [*zip(line.get_xdata(), line.get_ydata(), strict=True)]
        if line.get_marker() == ".":
            dots[points[0][0]] = [round(y, 2) for _, y in points]
        else:
            curves.append((points, line.get_linestyle()))
    assert dots == {1: [0.89, 1], 2: [2, 2], 4: [2], 8: [8]}
    assert curves == [
        ([(1, 1), (2, 2), (4, 4), (8, 8)], "-"),
        ([(1, 1), (4, 2)], "None"),  # two points are no curve
        ([(1, 1), (8, 8)], "--"),
    ]
    found = [list(line.get_ydata()) for line in right.lines]
    assert found == [[1, 1, 1, 1], [1, 0.5]]
    names = [text.get_text() for text in axes.get_legend().get_texts()]
    assert [name.replace("\n", " ") for name in names] == [
        f"{NAME}_multigpu, batch 25 per GPU: 2.00 on 2, 4.00 on 4, 8.00 on 8",
        f"{NAME}_multigpu, 2 nodes, batch 25 per GPU: 2.00 on 4",
        "ideal",
    ]
    title = axes.get_title().replace("\n", " ")
    assert "H200, 2000 images an epoch" in title
    assert "each dot is a run, the line their median: 1 to 2 runs" in title


def test_the_plot_has_few_lines(tmp_path):
    """Of a class with 200 versions of a script. It says how many are left out."""
    runs = [result("single", 1, 100)]
    runs += [result(f"my_ddp_{i}", 2, 150 + i % 40) for i in range(200)]
    figure = draw(runs)
    figure.savefig(tmp_path / "plot.png", dpi=50, bbox_inches="tight")
    axes, _ = figure.axes
    assert len(axes.get_legend().get_texts()) == MAX_LINES + 1
    assert f"{200 - MAX_LINES} more lines are in the table" in axes.get_title()


def hand_in(folder, **people):
    """Write a results file per person, of runs or text; return the files."""
    for who, lines in people.items():
        lines = [n if isinstance(n, str) else json.dumps(n) for n in lines]
        (folder / who).mkdir(parents=True)
        (folder / who / "results.jsonl").write_text("\n".join(lines) + "\n")
    return [folder / who / "results.jsonl" for who in people]


def test_runs_of_a_class_are_merged(tmp_path):
    """Machines have separate tables."""
    two = f"{NAME}_multigpu"
    files = hand_in(
        tmp_path,
        anna=[result(NAME, 1, 100, **EPYC), result(two, 2, 150, **EPYC)],
        ben=[result(NAME, 1, 90, **EPYC), *2 * [result(two, 2, 180, **EPYC)]],
        carl=[result(two, 2, 160, **EPYC)],
        dora=[result(NAME, 1, 2000, **EPYC | {"cpu": "AMD Ryzen"})],
    )
    (epyc, ours), (ryzen, _) = compare(read_runs(files)).items()
    assert "CPU core, 2 x AMD EPYC, 2000" in epyc and "2 x AMD Ryzen" in ryzen
    assert [(row["speed"], row["runs"]) for row in ours] == [(100, 2), (160, 3)]
    assert [row["speedup"] for row in ours] == [1, pytest.approx(1.6)]
    assert ours[1]["spread"] == pytest.approx(0.2) and not ours[1]["notes"]


def test_solutions_and_profiled_runs_are_apart():
    patient = result("patient1", 2, 100)
    runs = [patient, patient | {"script": "solutions/patient1.py"}]
    rows = rows_of(*runs, patient | {"profiled": True}, patient)
    assert sorted(row["runs"] for row in rows) == [1, 1, 2]


def test_lines_that_do_not_count_are_reported(tmp_path, capsys):
    """Lines that are not runs, runs with --verbose, and runs under the checkup."""
    good = result(NAME, 1, 100)
    del (lacking := dict(good))["per_epoch"]
    chatty = result(NAME, 1, 50, verbose=True)
    checked = good | {"checkup": True}
    anna = good, "not JSON", [good], good, checked, checked | {"gpus": 2}
    files = hand_in(tmp_path, anna=anna, ben=[lacking, chatty])
    assert [run["speed"] for run in read_runs(files)] == [100]
    first, second, chatty, checked = capsys.readouterr().err.splitlines()
    assert f"{files[0]}: left out 2 lines, the first by JSONDecodeError: " in first
    assert "left out 1 lines, the first by KeyError: 'per_epoch'" in second
    assert chatty.startswith("Warning: left out 1 run with --verbose")
    assert checked.startswith("Warning: left out 2 runs under the checkup")
    with raises_user_error("no results in .*; run a script first"):
        read_runs(files[1:])


def test_epochs_that_vary_have_a_note():
    """Of the first, which is slow, and of those that fine-tune it says nothing."""
    steady = result(NAME, 1, 100, epochs=4, epoch_seconds=[5, 1, 1.4, 1])
    busy = steady | {"epoch_seconds": [5, 1, 1.6, 1, 99]}
    assert parse_run(steady)["notes"] == [] and parse_run(busy)["epochs"] == 4
    assert parse_run(busy)["speed"] == 2000
    assert parse_run(busy)["notes"][0].startswith("epochs of 1.0 to 1.6 s: repeat")


def test_compare_prints_tables_and_writes_a_plot_and_a_csv_file(tmp_path):
    """The table shows the runs of all, the CSV file each person's speed-ups."""
    one, two = result(NAME, 1, 100), result(f"{NAME}_multigpu", 2, 190)
    anna, ben = hand_in(tmp_path, anna=[one, two], ben=[two, result(NAME, 1, 95)])
    plot, table = tmp_path / "new/plot.png", tmp_path / "class.csv"
    command = [sys.executable, "../tools/compare.py", anna, ben]
    done = run([*command, "--plot", plot, "--csv", table], REPOSITORY / "exercise8")
    assert done.returncode == 0 and done.stdout.count(" 1.90 ") == 1, done.stderr
    assert plot.read_bytes().startswith(b"\x89PNG") and str(plot) in done.stdout
    rows = [*csv.DictReader(table.open())]
    assert [(row["file"], row["gpus"], row["speedup"]) for row in rows] == [
        (str(anna), "1", "1.0"),
        (str(anna), "2", "1.9"),
        (str(ben), "1", "1.0"),
        (str(ben), "2", "2.0"),
    ]


def mfu(exercise, tmp_path, runs, *options):
    """Run mfu.py in an exercise; return the words of each line but the header."""
    file = tmp_path / "results.jsonl"
    file.write_text("".join(json.dumps(run) + "\n" for run in runs))
    command = [sys.executable, "../tools/mfu.py", file, *options]
    done = run(command, REPOSITORY / exercise)
    assert done.returncode == 0, done.stderr
    return [line.split() for line in done.stdout.splitlines()[1:]]


RESNET = {"arch": "resnet152", "image_size": 224, "backbone": None}
GPT = {"layers": 12, "width": 768, "heads": 12, "length": 256, "unit": "tokens"}


def test_mfu_of_gpus_is_relative_to_their_data_sheet(tmp_path):
    a100 = {"device": "NVIDIA A100-SXM4-40GB", **RESNET}
    runs = [
        result("train_ddp_cifar100", 2, 1000, **a100),
        result("train_cifar100", 1, 1000, amp=True, **a100),
        result("train_cifar100", 1, 1000, amp=True, dtype="fp32", **a100),
        result("mine", 1, 1000, **RESNET),
    ]
    two, amp, fp32, other, note = mfu("cifar100_demo", tmp_path, runs)
    # 68.83 GFLOP an image: see test_parameters_and_flops_match_torchvision
    assert two[-5:] == ["68.8", "34.4", "float32", "156", "22%"]
    assert amp[-6:] == ["68.8", "68.8", "16", "bits", "312", "22%"]
    assert fp32[-3:] == ["float32", "156", "44%"]
    assert other[-3:] == ["float32", "?", "?"]
    assert " ".join(note) == "1: no peak for H200: measure it, and add --check FILE"


def test_mfu_of_ranks_that_share_a_gpu_is_that_of_the_gpu(tmp_path):
    a100 = {"device": "NVIDIA A100-SXM4-40GB", **RESNET}
    shared = result("train_ddp_cifar100", 2, 1000, gpus_shared=1, **a100)
    (line,) = mfu("cifar100_demo", tmp_path, [shared])
    assert line[1] == "1" and line[-1] == "44%"
    (tmp_path / "check.json").write_text('{"processes": [], "gpus_shared": 1}')
    files = tmp_path / "results.jsonl", "--check", tmp_path / "check.json"
    done = run([sys.executable, "tools/mfu.py", *files], REPOSITORY)
    fails(done, "several ranks shared a GPU")


def test_mfu_of_a_cpu_is_relative_to_what_check_measured(tmp_path):
    cpu = {"device": "CPU core", "cpu": "AMD EPYC", "cpus": 1}
    speed = {"per_epoch": 2000, "epoch_seconds": [2000 / 300] * 10}
    runs = [result("ddp", 2, 1, **cpu, **GPT) | speed]
    runs.append(result("fsdp", 2, 1, bf16=True, **cpu, **GPT) | speed)
    found = {"device": "AMD EPYC", "float32_tflops": 0.1, "bfloat16_tflops": 0.4}
    check = tmp_path / "check.json"
    check.write_text(json.dumps({"processes": [found]}))
    ddp, bf16 = mfu("dp_ddp_intro", tmp_path, runs, "--check", check)
    # 6 FLOPs per weight (not of embeddings) and token, and 12 x layers x width x
    # length for the attention (PaLM's appendix B, https://arxiv.org/abs/2204.02311)
    weights = 12 * 12 * 768**2 + 768 * 256
    gflop = (6 * weights + 12 * 12 * 768 * 256) / 1e9
    assert float(ddp[-5]) == pytest.approx(gflop, rel=1e-2)
    tflops = 150 * gflop / 1e3
    assert ddp[-2:] == ["0.1", f"{tflops / 0.1:.0%}"]
    assert bf16[-2:] == ["0.4", f"{tflops / 0.4:.0%}"]


def test_mfu_knows_the_models_of_three_lessons(tmp_path):
    (tmp_path / "results.jsonl").write_text(json.dumps(result(NAME, 1, 100)) + "\n")
    command = [sys.executable, "../tools/mfu.py", tmp_path / "results.jsonl"]
    fails(run(command, REPOSITORY / "exercise8"), "only models of cifar100_demo")
