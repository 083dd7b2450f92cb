"""compare.py with results.py, and mfu.py."""

import csv
import json
import re
import sys

import pytest
from conftest import REPOSITORY, call, raises_user_error, run

import mfu
from compare import compare, describe, make_table, print_table
from results import parse_run, read_runs
from speedup_plot import draw_speedups

SINGLE = "pytorch_dvc_cnn_pretrained"
MULTI = f"{SINGLE}_multigpu"
EPYC = {"device": "CPU core", "cpu": "AMD EPYC", "cpus": 2}


def result(script, gpus, speed, batch=25, **fields):
    """Return a run as RunLog writes it; unknown fields are options."""
    options = {"epochs": 10, "batch_size": batch, "workers": 1}
    run = {"script": script, "gpus": gpus, "nodes": 1, "device": "H200"}
    run |= {"cpu": "Xeon", "cpus": 64, "unit": "images", "per_epoch": 2000}
    seconds = fields.get("per_epoch", 2000) / speed
    run["epoch_seconds"] = [seconds] * fields.get("epochs", 10)
    run |= {"epoch_ends": [1.0], "training_seconds": 10, "torch": "2.15.0"}
    run |= {"accuracy": 90.0, "peak_memory_gb": 2.0, "gradient_bytes": None}
    run |= {"profiled": False, "gpus_shared": None}
    for name, value in fields.items():
        where = run if name in run else options
        where[name] = value
    return run | {"options": options}


def rows_of(*runs):
    """Return the rows of all tables."""
    return [row for rows in compare(map(parse_run, runs)).values() for row in rows]


def speedups(*runs):
    return [(row["script"], row["gpus"], row["speedup"]) for row in rows_of(*runs)]


def test_a_run_is_compared_with_the_same_batch_on_one_gpu():
    runs = [result(SINGLE, 1, 100), result(SINGLE, 1, 90, batch=24)]
    runs += [result(MULTI, 2, 180), result(MULTI, 8, 700)]
    runs.append(result("my_ddp", 2, 160))  # a student's copy
    runs.append(result("strong_scaling", 2, 135, batch=12))
    runs.append(result(MULTI, 2, 50, batch=64))  # no run on one had 64 or 128
    assert speedups(*runs) == [
        (SINGLE, 1, 1),
        (SINGLE, 1, 1),
        (MULTI, 2, 1.8),
        ("my_ddp", 2, 1.6),
        ("strong_scaling", 2, 1.5),
        (MULTI, 2, None),
        (MULTI, 8, 7),
    ]


def test_other_data_and_other_machines_have_their_own_tables():
    large = {"per_epoch": 22000}
    runs = [result(SINGLE, 1, 100), result(SINGLE, 1, 3, **EPYC)]
    runs.append(result(f"{SINGLE}_largedata", 1, 50, **large))
    runs.append(result(f"{SINGLE}_largedata_multigpu", 4, 100, nodes=2, **large))
    groups = compare(map(parse_run, runs))
    assert [
        (title.split(", ", 2)[2], len(rows)) for title, rows in groups.items()
    ] == [
        ("CPU core, 2 x AMD EPYC, 2000 images an epoch", 1),
        ("H200, 2000 images an epoch", 1),
        ("H200, 22000 images an epoch", 2),
    ]
    *_, (one, four) = groups.values()
    assert (one["efficiency"], four["speedup"], four["efficiency"]) == (1, 2, 0.5)


def test_strong_scaling_is_compared_at_the_global_batch():
    """The table says so, as most rows are compared at the same batch per GPU."""
    whole = result(SINGLE, 1, 160, batch=200)
    strong = result("strong_scaling", 8, 800)
    *_, row = rows = rows_of(result(SINGLE, 1, 100), whole, strong)
    assert row["speedup"] == 5
    (header, *lines), _ = make_table(rows)
    shown = [line[header.index("baseline")] for line in lines]
    assert shown == ["", "", "200 in total"]


@pytest.mark.parametrize(
    "script", [MULTI, "strong_scaling", "mnist_multigpu", "context_parallel"]
)
def test_a_script_for_several_gpus_is_no_baseline(script):
    assert speedups(result(script, 1, 90)) == [(script, 1, None)]


def test_the_baseline_has_several_epochs_if_possible():
    """The first epoch is slow."""
    runs = result(SINGLE, 1, 130, epochs=1), result(SINGLE, 1, 120, lr=1)
    *_, two = speedups(*runs, result(MULTI, 2, 150))
    assert two == (MULTI, 2, pytest.approx(1.25))


def test_amp_is_compared_with_amp():
    single, amp = result("cinic", 1, 50), result("cinic_amp", 1, 100)
    ddp = result("cinic_ddp", 2, 190)  # has AMP
    assert speedups(single, amp, ddp)[-1] == ("cinic_ddp", 2, 1.9)
    assert speedups(single, ddp)[-1] == ("cinic_ddp", 2, None)


@pytest.mark.parametrize(
    "note, speedup, one, two",
    [
        ("", 1.5, {}, {"lr": 1, "seed": 3, "optimizer": "adam"}),
        # With --steps an epoch grows with the number of GPUs.
        ("", 1.5, {"steps": 9, "per_epoch": 900}, {"steps": 9, "per_epoch": 1800}),
        ("no run on one GPU .* batch 7 or 14 and", None, {}, {"batch": 7}),
        ("no run on one GPU", None, EPYC | {"cpus": 8}, EPYC),
        ("no run on one GPU", None, {"workers": 2}, {}),
        ("no run on one GPU", None, {"torch": "2.8"}, {}),
        ("no run on one GPU", None, {}, {"profiled": True}),
        ("^ran 2 of 10 epochs: stopped", 1, {}, {"epoch_seconds": [20, 20]}),
        ("^only one epoch: the first", 1.5, {}, {"epochs": 1}),
        ("^efficiency 150%, so the machine", 3, {"epoch_seconds": [40] * 10}, {}),
    ],
)
def test_unusual_runs_have_notes(note, speedup, one, two):
    runs = result(SINGLE, 1, 100, **one), result(MULTI, 2, 150, **two)
    *_, row = sorted(rows_of(*runs), key=lambda row: row["gpus"])
    assert row["speedup"] == pytest.approx(speedup)
    assert len(row["notes"]) == bool(note)
    assert re.search(note, " ".join(row["notes"]))


def test_epochs_that_vary_have_a_note():
    """The first epoch, which is slow, and those that fine-tune do not count."""
    steady = result(SINGLE, 1, 100, epochs=4, epoch_seconds=[5, 1, 1.4, 1])
    busy = parse_run(steady | {"epoch_seconds": [5, 1, 1.6, 1, 99]})
    assert parse_run(steady)["notes"] == []
    assert (busy["epochs"], busy["speed"]) == (4, 2000)
    assert busy["notes"][0].startswith("epochs of 1.0 to 1.6 s: repeat")


@pytest.mark.parametrize(
    "speeds, shown, busy",
    [
        ([100, 120], 120, False),
        ([120, 40], 120, True),  # which was disturbed? a third run will tell
        ([124, 40, 120], 120, False),
        ([40, 44, 120], 44, True),
    ],
)
def test_repeats_have_one_row(speeds, shown, busy):
    """It shows the median run, of two the faster; a note asks for another run."""
    runs = [result(SINGLE, 1, speed, seed=speed) for speed in speeds]
    (row,) = rows_of(*runs)
    assert (round(row["speed"]), row["runs"]) == (shown, len(speeds))
    assert row["spread"] == pytest.approx(max(speeds) / min(speeds) - 1)
    notes = [note.partition(",")[0] for note in row["notes"]]
    assert notes == [f"spread {row['spread']:.0%}"] * busy


def test_solutions_and_profiled_runs_are_no_repeats():
    patient = result("patient1", 2, 100)
    solution, profiled = {"script": "solutions/patient1.py"}, {"profiled": True}
    runs = patient, patient | solution, patient | profiled
    assert [row["runs"] for row in rows_of(*runs, patient)] == [2, 1, 1]


def test_ranks_that_share_a_gpu_have_no_speedup():
    """Nor are they repeats of a run with a GPU for every rank."""
    runs = [result(SINGLE, 1, 100), result(MULTI, 2, 190)]
    runs.append(result(MULTI, 2, 150, gpus_shared=1))
    rows = rows_of(*runs)
    assert [row["speedup"] for row in rows] == [1, 1.9, None]
    (note,) = rows[-1]["notes"]
    assert note.startswith("no speed-up: 2 ranks on 1 H200 take turns")
    lines, _ = make_table(rows)
    assert [line[1] for line in lines] == ["GPUs", "1", "2", "2 ranks on 1 H200"]


def test_the_table_has_a_column_per_option_that_differs(capsys):
    """The title has the options that are equal in all runs."""
    runs = [result(SINGLE, 1, speed, size=40, lr=1) for speed in (80, 110, 60)]
    runs.append(result(MULTI, 2, 150, size=40, lr=2, nodes=2, accuracy=None))
    ((title, rows),) = compare(map(parse_run, runs)).items()
    assert title == f"{SINGLE}, workers 1, size 40, H200, 2000 images an epoch"
    print_table(*make_table(rows))
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == (
        "script GPUs nodes per GPU batch images/s speed-up efficiency "
        "training accuracy memory runs spread note lr"
    )
    assert lines[1:3] == [
        f"{SINGLE} 1 1 25 25 80.0 1.00 100% 10.0 s 90.00 % 2.00 GB 3 83% 1 1",
        f"{MULTI} 2 2 25 50 150.0 1.88 94% 10.0 s 2.00 GB 1 0% 2",
    ]
    assert lines[3].startswith("1: spread 83%, so the machine was busy: repeat")


def test_columns_that_do_not_fit_follow_below(capsys):
    header = ["script", *(f"option_{i}" for i in range(30))]
    print_table([header, [SINGLE, *["x" * 20] * 30]], [])
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= 160
    assert re.findall(r"option_\d+", printed) == header[1:]


def test_the_plot_has_a_bar_for_each_command_and_its_ideal():
    """Without a baseline there is no ideal, and so no bar."""
    runs = [result(SINGLE, 1, 100), result(MULTI, 2, 150, batch=64)]
    runs += [result(MULTI, gpus, 90 * gpus) for gpus in (2, 4)]
    (axes,) = draw_speedups(compare(map(parse_run, runs)), describe).axes
    widths = [[round(bar.get_width()) for bar in bars] for bars in axes.containers]
    assert widths == [[100, 180, 360], [100, 200, 400]]
    assert [text.get_text() for text in axes.texts][1:] == [
        f"{MULTI}, batch 25 per GPU, 2 x H200: 180.0 images/s, speed-up 1.80",
        f"{MULTI}, batch 25 per GPU, 4 x H200: 360.0 images/s, speed-up 3.60",
    ]
    assert draw_speedups({}, describe).axes == []


def hand_in(folder, **people):
    """Write a results file per person, of runs or text; return the files."""
    files = []
    for person, lines in people.items():
        files.append(folder / person / "results.jsonl")
        files[-1].parent.mkdir()
        lines = [n if isinstance(n, str) else json.dumps(n) for n in lines]
        files[-1].write_text("\n".join(lines) + "\n")
    return files


def test_lines_that_do_not_count_are_reported(tmp_path, capsys):
    """Lines that are not runs, runs with --verbose, and runs under the checkup.

    A line that is there twice counts once.
    """
    good = result(SINGLE, 1, 100)
    checked = good | {"checkup": True}
    lacking = {name: good[name] for name in good if name != "per_epoch"}
    anna = good, "not JSON", [good], good, checked, checked | {"gpus": 2}
    ben = lacking, result(SINGLE, 1, 50, verbose=True)
    files = hand_in(tmp_path, anna=anna, ben=ben)
    assert [run["speed"] for run in read_runs(files)] == [100]
    first, second, verbose, checked = capsys.readouterr().err.splitlines()
    assert f"{files[0]}: left out 2 lines, the first by JSONDecodeError: " in first
    assert "left out 1 lines, the first by KeyError: 'per_epoch'" in second
    assert verbose.startswith("Warning: left out 1 run with --verbose")
    assert checked.startswith("Warning: left out 2 runs under the checkup")
    with raises_user_error("no results in .*; run a script first"):
        read_runs(files[1:])


def test_compare_prints_tables_and_writes_a_plot_and_a_csv_file(tmp_path):
    """The table shows the runs of all, the CSV file each person's speed-ups."""
    one, two = result(SINGLE, 1, 100), result(MULTI, 2, 190)
    files = hand_in(tmp_path, anna=[one, two], ben=[two, result(SINGLE, 1, 95)])
    plot, table = tmp_path / "new/plot.png", tmp_path / "class.csv"
    command = [sys.executable, "../tools/compare.py", *files]
    done = run([*command, "--plot", plot, "--csv", table], REPOSITORY / "exercise8")
    assert done.returncode == 0 and done.stdout.count(" 1.90 ") == 1, done.stderr
    assert plot.read_bytes().startswith(b"\x89PNG") and str(plot) in done.stdout
    rows = [*csv.DictReader(table.open())]
    assert [(row["file"], row["gpus"], row["speedup"]) for row in rows] == [
        (str(files[0]), "1", "1.0"),
        (str(files[0]), "2", "1.9"),
        (str(files[1]), "1", "1.0"),
        (str(files[1]), "2", "2.0"),
    ]


def run_mfu(exercise, tmp_path, runs, *options):
    """Run mfu.py in an exercise; return the words of each line but the header."""
    (file,) = hand_in(tmp_path, student=runs)
    command = [sys.executable, "../tools/mfu.py", file, *options]
    done = run(command, REPOSITORY / exercise)
    assert done.returncode == 0, done.stderr
    return [line.split() for line in done.stdout.splitlines()[1:]]


def test_mfu_of_gpus_is_relative_to_their_data_sheet(tmp_path):
    resnet = {"arch": "resnet152", "image_size": 224}
    a100 = resnet | {"device": "NVIDIA A100-SXM4-40GB"}
    runs = [
        result("train_ddp_cifar100", 2, 1000, **a100),
        result("train_cifar100", 1, 1000, amp=True, **a100),
        result("train_cifar100", 1, 1000, amp=True, dtype="fp32", **a100),
        result("train_ddp_cifar100", 2, 1000, gpus_shared=1, **a100),
        result("mine", 1, 1000, **resnet),
    ]
    two, amp, fp32, shared, other, note = run_mfu("cifar100_demo", tmp_path, runs)
    # 68.83 GFLOP an image: see test_parameters_and_flops_match_torchvision
    assert two[-5:] == ["68.8", "34.4", "float32", "156", "22%"]
    assert amp[-6:] == ["68.8", "68.8", "16", "bits", "312", "22%"]
    assert fp32[-3:] == ["float32", "156", "44%"]
    assert shared[1] == "1" and shared[-1] == "44%"  # of the one GPU
    assert other[-3:] == ["float32", "?", "?"]
    assert " ".join(note) == "1: no peak for H200: measure it, and add --check FILE"


def test_mfu_of_a_cpu_is_relative_to_what_check_measured(tmp_path):
    gpt = {"layers": 12, "width": 768, "heads": 12, "length": 256, "unit": "tokens"}
    cpu = gpt | EPYC
    runs = [result("ddp", 2, 300, **cpu), result("fsdp", 2, 300, bf16=True, **cpu)]
    found = {"device": "AMD EPYC", "float32_tflops": 0.1, "bfloat16_tflops": 0.4}
    check = tmp_path / "check.json"
    check.write_text(json.dumps({"processes": [found]}))
    ddp, bf16 = run_mfu("dp_ddp_intro", tmp_path, runs, "--check", check)
    # 6 FLOPs per weight (not of embeddings) and token, and 12 x layers x width x
    # length for the attention (PaLM's appendix B, https://arxiv.org/abs/2204.02311)
    weights = 12 * 12 * 768**2 + 768 * 256
    gflop = (6 * weights + 12 * 12 * 768 * 256) / 1e9
    assert float(ddp[-5]) == pytest.approx(gflop, rel=1e-2)
    tflops = 150 * gflop / 1e3
    assert ddp[-2:] == ["0.1", f"{tflops / 0.1:.0%}"]
    assert bf16[-2:] == ["0.4", f"{tflops / 0.4:.0%}"]


def test_mfu_reports_a_model_that_it_cannot_count_and_a_shared_gpu(tmp_path):
    (file,) = hand_in(tmp_path, student=[result(SINGLE, 1, 100)])
    with raises_user_error("only models of cifar100_demo"):
        call(mfu, file)
    check = tmp_path / "check.json"
    check.write_text('{"processes": [], "gpus_shared": 1}')
    with raises_user_error("several ranks shared a GPU"):
        call(mfu, file, "--check", check)
