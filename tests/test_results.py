"""What a run leaves behind, and what compare.py makes of it."""

import argparse
import json
import os
import re
import sys
import time

import pytest
import torch
from compare import compare, draw, plot, print_table, tabulate
from compare_html import find_people
from compare_read import find_files, prepare, read_runs, tell_apart
from conftest import REPOSITORY, run

from common.cli import UserError
from common.log import RunLog

CPU = torch.device("cpu")


def args(**options):
    return argparse.Namespace(**{"batch_size": 5, "epochs": 3, "lr": 0.1, **options})


def test_result_and_scalars_of_a_run(tmp_path, monkeypatch, capsys):
    from tensorboard.backend.event_processing.event_accumulator import (
        EventAccumulator,
    )

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["/some/where/script.py"])
    log = RunLog(args(), CPU, world_size=2)
    for epoch, seconds in enumerate(
        [50, 2, 4, 1000], start=1
    ):  # the 4th is fine-tuning
        log.epoch(epoch, 100, seconds, train={"loss": 1 / epoch, "accuracy": 50.0})
    log.finish(accuracy=75.0)
    (result,) = read_runs(["logs/results.jsonl"])
    assert result["script"] == "script" and result["gpus"] == 2
    assert result["batch_per_gpu"] == 5 and result["batch"] == 10
    assert result["seconds_per_epoch"] == 3 and result["images_per_epoch"] == 100
    assert result["images_per_second"] == pytest.approx(100 / 3)
    assert result["accuracy"] == 75 and result["device"] == "CPU core"
    assert 0.05 < result["peak_memory_gb"] < 100
    assert result["cpus"] == os.cpu_count() and result["cpu"].strip()
    assert "Epoch 2: 2.0 s, 50.0 images/s; train loss 0.5 accuracy 50 %" in (
        capsys.readouterr().out
    )
    events = EventAccumulator(str(next(tmp_path.glob("logs/script-*")))).Reload()
    assert [e.value for e in events.Scalars("train/loss")][:2] == [1, 0.5]
    assert [e.step for e in events.Scalars("images_per_second")] == [1, 2, 3, 4]


def test_a_disabled_log_does_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    log = RunLog(args(), CPU, world_size=2, enabled=False)
    log.print("x")
    log.epoch(1, 100, 1.0, train={"loss": 1.0})
    log.finish(accuracy=1.0)
    assert capsys.readouterr().out == "" and list(tmp_path.iterdir()) == []


def test_in_a_log_file_a_line_comes_every_30_seconds(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    log = RunLog(args(), CPU, world_size=2, scalars=False)
    capsys.readouterr()
    clock = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])

    class Slow(list):
        def __iter__(self):
            for batch in super().__iter__():
                clock[0] += 8
                yield batch

    loader = Slow((torch.zeros(5, 3), torch.zeros(5)) for _ in range(9))
    assert [*log.bar(loader)] == loader
    assert [*log.bar(loader, 2)] == loader[:2]
    lines = "4 of 9 steps, 1.2 images/s", "8 of 9 steps, 1.2 images/s"
    said = capsys.readouterr().out.splitlines()
    assert said == [f"training: {line}" for line in lines]
    with torch.no_grad():
        assert [*log.bar(loader)] == loader
    said = capsys.readouterr().out.splitlines()
    assert said == [f"evaluating: {line}" for line in lines]
    silent = RunLog(args(), CPU, world_size=2, enabled=False)
    assert [*silent.bar(loader)] == loader and silent.batch == 10
    assert capsys.readouterr() == ("", "")


def test_processes_that_share_cores(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    monkeypatch.setenv("GROUP_WORLD_SIZE", "2")
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)  # so both nodes are here
    log = RunLog(args(), CPU, world_size=16, scalars=False)
    log.epoch(1, 100, 1)
    log.finish()
    assert capsys.readouterr().out.splitlines()[1] == (
        "Batch size: 5 per rank x 16 ranks = 80"
    )
    (result,) = read_runs(["logs/results.jsonl"])
    assert (result["device"], result["nodes"]) == ("CPU core (16 share 2)", 2)


def result(script, gpus, speed, batch=25, raw=False, **fields):
    options = {"epochs": 10, "batch_size": batch, "backbone": "tinyvgg"}
    run = {
        "script": script,
        "gpus": gpus,
        "device": "H200",
        "batch_per_gpu": batch,
        "batch": batch * gpus,
        "options": options,
        "images_per_epoch": 2000,
        "seconds_per_epoch": 2000 / speed,
        "images_per_second": speed,
        "training_seconds": 10,
        "accuracy": 90.0,
        "peak_memory_gb": 1.0,
        "finished": "2026-11-21T09:30:00+0100",
        **fields,
    }
    return run if raw else prepare(run)


NAME = "pytorch_dvc_cnn_pretrained"


def table(runs):
    """Return what is shown of the only title: script, GPUs, speed-up."""
    (rows,) = compare(runs).values()
    return [(row["script"], row["gpus"], row.get("speedup")) for row in rows]


def test_twins_are_compared_with_the_run_on_one_gpu():
    runs = [
        result(f"{NAME}_multigpu", 8, 700),
        result(f"{NAME}_multigpu", 2, 180),
        result(NAME, 1, 90, batch=24),
        result(NAME, 1, 100),
        result("strong_scaling", 2, 135, batch=12),
        result(f"{NAME}_multigpu", 2, 300, batch=64),
        result(f"{NAME}_largedata", 1, 50, images_per_epoch=22000),
        result(f"{NAME}_largedata_multigpu", 4, 100, images_per_epoch=22000),
        result(NAME, 1, 3, device="CPU core"),
    ]
    groups = compare(runs)
    assert sorted(map(len, groups.values())) == [1, 2, 6]
    small = max(groups.values(), key=len)
    assert [(r["gpus"], r.get("speedup"), r.get("efficiency")) for r in small] == [
        (1, 1.0, 1.0),
        (1, 1.0, 1.0),
        (2, None, None),  # none on one GPU had 64, or 128
        (2, 1.8, 0.9),
        (2, 1.5, 0.75),
        (8, 7.0, 0.875),
    ]
    (large,) = (rows for title, rows in groups.items() if "22000 images" in title)
    assert [row["speedup"] for row in large] == [1, 2]
    (cpu,) = (rows for title, rows in groups.items() if "CPU core" in title)
    assert cpu[0]["speedup"] == 1


def test_without_a_run_on_one_gpu_there_is_no_speedup():
    assert table([result(f"{NAME}_multigpu", 2, 180)])[0][2] is None
    for script in (
        f"{NAME}_multigpu",
        "strong_scaling",
    ):  # with one process: not plain
        assert [row[2] for row in table([result(script, 1, 90)])] == [None]
    runs = [result(NAME, 1, 100), result(f"{NAME}_multigpu", 2, 180)]
    runs[1]["options"]["workers"] = 7  # one had help that the other had not
    assert [row[2] for row in table(runs)] == [1, None]


def test_strong_scaling_is_held_against_the_whole_batch():
    runs = [result(NAME, 1, 100), result(NAME, 1, 160, batch=200)]
    runs.append(result("strong_scaling", 8, 800))
    rows = [row for rows in compare(runs).values() for row in rows]
    assert (rows[2]["speedup"], rows[2]["against"]) == (5, "200 in all")


def test_without_a_gpu_dataparallel_is_no_baseline():
    device = {"device": "CPU core"}
    runs = [
        result(
            "mnist_multigpu", 1, 120, **device
        ),  # one core, whatever it was given
        result("mnist_singlegpu", 1, 100, **device),
        result("mnist_ddp", 2, 150, **device),
        result("mnist_ddp", 8, 200, device="CPU core (8 share 2)"),
    ]
    assert [row[1:] for row in table(runs)] == [(1, 1.2), (1, 1), (2, 1.5), (8, 2)]


def test_repeats_are_one_row():
    runs = [result(NAME, 1, speed, accuracy=speed) for speed in (90, 100, 80, 60)]
    ((row,),) = compare(runs).values()
    assert (row["runs"], row["speed"], row["accuracy"]) == (4, 80, 80)
    assert row["spread"] == pytest.approx(100 / 60 - 1)


def test_nodes_and_what_differs_are_columns(capsys):
    runs = [result(NAME, 1, 100), result(NAME, 1, 40)]
    runs += [result(f"{NAME}_multigpu", 2, 180, nodes=nodes) for nodes in (1, 2)]
    runs += [result(f"{NAME}_multigpu", 2, 60)]
    for one in runs:
        one["options"] |= {"image_size": 40, "amp": True, "weights": None, "lr": 1}
    runs[1]["options"]["backbone"] = runs[-1]["options"]["backbone"] = "vgg16"
    runs[3]["options"]["lr"] = 2
    groups = compare(runs)
    ((title, rows),) = groups.items()
    assert title == f"{NAME}.py --image-size 40 --amp  # H200, 2000 images an epoch"
    by = [(r["gpus"], r["nodes"], *r["differs"].values()) for r in rows]
    assert [*rows[0]["differs"]] == ["--backbone", "--lr"]
    assert by == [
        (1, 1, "tinyvgg", 1),
        (1, 1, "vgg16", 1),
        (2, 1, "tinyvgg", 1),
        (2, 2, "tinyvgg", 2),
        (2, 1, "vgg16", 1),
    ]
    assert [row["speedup"] for row in rows] == [1, 1, 1.8, 1.8, 1.5]
    print_table(rows)
    header, *lines = capsys.readouterr().out.splitlines()
    assert "nodes" in header.split() and header.split()[-2:] == [
        "--backbone",
        "--lr",
    ]
    assert [line.split()[-1] for line in lines][2:4] == ["1", "2"]


def test_lines_of_the_plot(tmp_path, monkeypatch):
    """One for each configuration, over rising numbers of GPUs, and the ideal."""
    from matplotlib.figure import Figure

    runs = [result(NAME, 1, 100), result(NAME, 1, 90)]
    runs += [result(f"{NAME}_multigpu", gpus, 90 * gpus) for gpus in (8, 2, 4, 2)]
    runs += [result(f"{NAME}_multigpu", 4, 200, nodes=2)]
    runs += [
        result("strong_scaling", 2, 150, batch=12)
    ]  # nothing to hold it against
    drawn = []
    monkeypatch.setattr(
        Figure, "savefig", lambda figure, *_, **__: drawn.append(figure)
    )
    draw(compare(runs), tmp_path / "new/plot.png")
    (axes,) = drawn[0].axes
    assert [list(line.get_xdata()) for line in axes.lines] == [
        [1, 2, 4, 8],
        [1, 4],
        [1, 8],
    ]
    names = [text.get_text() for text in axes.get_legend().get_texts()]
    assert names == [
        f"{NAME}_multigpu, batch 25 per GPU: 2.00 on 2, 4.00 on 4, 8.00 on 8",
        f"{NAME}_multigpu, 2 nodes, batch 25 per GPU: 2.22 on 4",
        "ideal",
    ]
    assert not axes.texts


def test_two_versions_are_two_lines_of_the_plot():
    old, new = {"torch": "2.8"}, {"torch": "2.15.0"}
    runs = [result(NAME, 1, 100, **old), result(NAME, 1, 110, **new)]
    runs += [result(f"{NAME}_multigpu", 2, 180, **of) for of in (old, old, new)]
    groups = compare(runs)
    (axes,) = plot(groups).axes
    names = [text.get_text().split("GPU, ")[-1] for text in axes.get_legend().texts]
    assert names == ["torch 2.8: 1.80 on 2", "torch 2.15.0: 1.64 on 2", "ideal"]
    assert [len(dots.get_offsets()) for dots in axes.collections] == [2, 1]
    lines, _ = tabulate(*groups.values())
    assert "torch" in lines[0] and "{framework}" not in lines[0]


def test_the_command_prints_a_table_and_draws(tmp_path):
    early, late = "2026-11-20T09:00:00+0100", "2026-11-21T09:30:00+0100"
    lines = [
        result(NAME, 1, 70, finished=early, raw=True),
        result(NAME, 1, 100, finished=late, raw=True),
        result(f"{NAME}_multigpu", 2, 190, finished=late, raw=True),
    ]
    file, plot = tmp_path / "results.jsonl", tmp_path / "plot.png"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    command = [sys.executable, "../bench/compare.py", file, "--plot", plot]
    done = run([*command, "--since", "2026-11-21 09:00"], REPOSITORY / "exercise8")
    assert done.returncode == 0, done.stderr
    header, first, second = done.stdout.splitlines()[2:5]
    assert header.split()[:3] == ["script", "GPUs", "nodes"]
    assert first.split()[:2] == [NAME, "1"] and "1.00" in first and "100%" in first
    assert second.split()[:2] == [f"{NAME}_multigpu", "2"] and "runs" not in header
    assert "1.90" in second and "95%" in second and "90.00 %" in second
    assert plot.read_bytes().startswith(b"\x89PNG") and str(plot) in done.stdout
    done = run(command, REPOSITORY / "exercise8")
    assert " 43%" in done.stdout and "runs" in done.stdout  # 70 and 100: two runs
    done = run([*command, "--since", "yesterday"], REPOSITORY / "exercise8")
    assert done.returncode == 2 and "--since" in done.stderr
    done = run([*command, "--since", "2026-12-01"], REPOSITORY / "exercise8")
    assert done.returncode == 2 and "no results" in done.stderr


@pytest.mark.parametrize("text", ["not json\n", "", None])
def test_no_results(text, tmp_path):
    file = tmp_path / "results.jsonl"
    if text is not None:
        file.write_text(text)
    with pytest.raises(UserError, match=r"results"):
        read_runs([str(file)])


def test_a_broken_line_costs_that_line(tmp_path, capsys):
    good = json.dumps(result(NAME, 1, 100, raw=True))
    lines = [good[:50] + good, good, "null", good.replace("gpus", "cores"), "\xff"]
    lines += [good.replace("100", "0")]
    file = tmp_path / "results.jsonl"
    file.write_bytes("\r\n".join(lines).encode("latin1"))
    assert len(read_runs([file])) == 1
    whys = {1: "no JSON", 3: "a value is odd", 4: "no 'gpus'", 5: "no JSON"}
    whys[6] = "a value is odd"
    assert capsys.readouterr().err.splitlines() == [
        f"Warning: line {number} of {file} is no run ({why}): left out"
        for number, why in whys.items()
    ]
    file.write_text(good + "\n{}" * 1239)
    read_runs([file])
    warnings = capsys.readouterr().err.splitlines()
    assert len(warnings) == 6 and "no 'script'" in warnings[0]
    assert warnings[5] == f"Warning: and 1,234 more of {file}"


def test_what_a_run_lacks_costs_no_run(tmp_path, capsys):
    runs = [result(NAME, 1, 100 + n, raw=True, epoch_ends=[1]) for n in range(3)]
    del runs[0]["options"]["epochs"]
    runs[1] |= {"accuracy": None, "epoch_ends": None, "torch": None}
    runs[2]["options"]["epochs"] = 10**30
    file = tmp_path / "results.jsonl"
    file.write_text("\n".join(map(json.dumps, runs)))
    found = read_runs([file])
    unknown = ["its number of epochs is not known"]
    assert [run["notes"] for run in found] == [unknown, [], unknown]
    for rows in compare(found).values():
        print_table(rows)
    printed = capsys.readouterr()
    assert "nan" not in printed.out and "None" not in printed.out + printed.err


def test_plots_that_cannot_be_written_and_readers_that_leave(tmp_path):
    file = tmp_path / "results.jsonl"
    file.write_text(json.dumps(result(NAME, 1, 100, raw=True)) + "\n")
    compare = f"{sys.executable} {REPOSITORY}/bench/compare.py {file}"
    for image in "plot.nothing", "/dev/null/plot.png":
        done = run(["bash", "-c", f"{compare} --plot {image}"], tmp_path)
        assert done.returncode == 2 and len(done.stderr.splitlines()) == 1, (
            done.stderr
        )
        assert f"cannot write {image}" in done.stderr
    done = run(["bash", "-c", f"{compare} | head -n 1"], tmp_path)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_full_disk_leaves_no_half_line(tmp_path):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs/results.jsonl").write_text("whole\n")
    code = (
        "import resource, torch; from argparse import Namespace\n"
        "from common.log import RunLog\n"
        "args = Namespace(batch_size=5, epochs=1)\n"
        "log = RunLog(args, torch.device('cpu'), scalars=False)\n"
        "log.epoch(1, 5, 1)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))\n"
        "log.finish()\n"
    )
    done = run([sys.executable, "-c", code], tmp_path, PYTHONPATH=str(REPOSITORY))
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1, done.stderr
    assert "no room for the result" in done.stderr
    assert (tmp_path / "logs/results.jsonl").read_text() == "whole\n"


EPYC = {"device": "CPU core", "cpu": "AMD EPYC", "cpus": 2, "torch": "2.15.0"}
RYZEN = EPYC | {"cpu": "AMD Ryzen", "cpus": 16}
H200 = {"device": "H200"}
TF3 = {"device": "H200 (TensorFlow)", "tensorflow": "3", "torch": None}


def hand_in(folder, **people):
    """Write a file for each, of runs or of text, and return the files."""
    for who, lines in people.items():
        lines = [n if isinstance(n, str) else json.dumps(n) for n in lines]
        (folder / who).mkdir(parents=True)
        (folder / who / "results.jsonl").write_text("\n".join(lines) + "\n")
    return find_files([str(folder)])


def line(script, gpus, speed, machine=EPYC, **fields):
    return result(script, gpus, speed, raw=True, **machine | fields)


def test_a_class_is_grouped_by_machine(tmp_path, capsys):
    """Of one command on one machine: the middle run, how many, whose, the spread."""
    files = hand_in(
        tmp_path,
        anna=[line(NAME, 1, 100), line(f"{NAME}_multigpu", 2, 150)],
        ben=[line(NAME, 1, 90), line(f"{NAME}_multigpu", 2, 180)],
        carl=[line(NAME, 1, 80), line(f"{NAME}_multigpu", 2, 160)],
        dora=[line(f"{NAME}_multigpu", 2, 2000, RYZEN)],
    )
    groups = compare(read_runs(files))
    (epyc, ours), (ryzen, hers) = groups.items()
    assert "CPU core, 2 x AMD EPYC, 2000" in epyc and "16 x AMD Ryzen" in ryzen
    shown = [(r["speed"], r["runs"], r["who"], r["ends"]) for r in ours]
    assert shown == [
        (90, 3, "anna, ben, carl", "carl to anna"),
        (160, 3, "anna, ben, carl", "anna to ben"),
    ]
    assert [row["speedup"] for row in ours] == [1, pytest.approx(160 / 90)]
    assert ours[1]["spread"] == pytest.approx(0.2) and not ours[1]["notes"]
    assert hers[0]["speedup"] is None
    (note,) = hers[0]["notes"]
    assert note == "no speed-up: on one GPU only on another machine"
    for rows in groups.values():
        print_table(rows)
    table = capsys.readouterr().out
    assert table.count("slowest to fastest") == 1 and "anna, ben, carl" in table
    assert table.endswith(f"  1: {note}\n")


def notes_of(row, *others, **people):
    (row,) = [
        r
        for rows in compare([prepare(r, "me") for r in (row, *others)]).values()
        for r in rows
        if r["script"].endswith("multigpu")
    ]
    return row["notes"], row["speedup"]


@pytest.mark.parametrize(
    "why, speedup, base, fields",
    [
        ("", 1.5, {}, {}),
        ("no run of .*pretrained.py on one GPU", None, None, {}),
        ("only with other data", None, {"images_per_epoch": 9}, {}),
        ("only on another machine", None, RYZEN, {}),
        ("none on one GPU with batch 25 or 50", None, {"batch": 7}, {}),
        ("only with another --workers$", None, {"workers": 1}, {"workers": 7}),
        ("8 processes shared 2 CPU", 1.5, {}, {"device": "CPU core (8 share 2)"}),
        ("torch 2.8, held against torch 2.15.0", 1.5, {}, {"torch": "2.8"}),
        ("only 2 of 10 epochs: stopped", 1.5, {}, {"epoch_ends": [1, 2]}),
        ("epochs: 1, held against 10", 1.5, {}, {"epochs": 1}),
        ("epochs is not known", 1.5, {}, {"epochs": "ten"}),
        ("no CPU named", None, {}, {"cpu": ""}),
        ("beside another CPU, AMD EPYC$", 1.5, H200, H200 | {"cpu": "Xeon"}),
        ("", 1.5, H200, H200 | {"cpu": ""}),
        (
            "tensorflow 2, held against tensorflow 3",
            1.5,
            TF3,
            TF3 | {"tensorflow": "2"},
        ),
    ],
)
def test_what_cannot_be_compared_says_why(why, speedup, base, fields):
    """And stays in the table."""
    runs = [line(f"{NAME}_multigpu", 2, 150)]
    if base is not None:
        runs.append(line(NAME, 1, 100))
    for run_, changes in zip(runs, (fields, base), strict=False):
        for name, value in changes.items():
            where = run_["options"] if name in ("workers", "epochs") else run_
            where[name] = value
    notes, got = notes_of(*runs)
    assert got == speedup and len(notes) >= bool(why)
    assert re.search(why, " ".join(notes)) if why else not notes


def test_the_same_torch_is_held_against_first():
    runs = [line(NAME, 1, 100, torch=v) for v in ("2.8", "2.15.0")]
    runs[0]["images_per_second"] = 120  # faster, and another
    assert notes_of(line(f"{NAME}_multigpu", 2, 150), *runs) == ([], 1.5)


def test_a_cpu_without_a_name_is_the_only_one_of_its_file(tmp_path):
    old = {"cpu": "", "cpus": None}
    mine = [line(NAME, 1, 100, **old), line(f"{NAME}_multigpu", 2, 150)]
    mixed = [*mine, line(NAME, 1, 400, RYZEN), line(NAME, 1, 70, H200 | old)]
    both = hand_in(tmp_path, anna=mine, ben=mixed)
    ((one, two),) = compare(read_runs(both[:1])).values()
    assert (one["machine"], two["speedup"]) == ("CPU core, 2 x AMD EPYC", 1.5)
    assert not one["notes"] and one["cpu"] == "AMD EPYC"
    machines = [run["machine"] for run in read_runs(both[1:])]
    assert machines[0] == "CPU core, CPU not named" and machines[3] == "H200"


def test_what_was_handed_in_twice_counts_once(tmp_path):
    mine = [line(NAME, 1, 100), line(f"{NAME}_multigpu", 2, 150)]
    files = hand_in(tmp_path, anna=mine, ben=mine, carl=[line(NAME, 1, 90)])
    runs = read_runs(files)
    ((one, two),) = compare(runs).values()
    assert (one["runs"], two["runs"], two["who"]) == (2, 1, "anna")
    twice = "there 2 times (anna, ben), counts once"
    assert two["notes"] == [twice] and one["notes"] == [f"anna: {twice}"]
    who, _, count, machines, last = find_people(files, runs)[1]
    assert (who, count) == ("ben", "2, of these also in another file: 2")
    assert (machines, last) == ("CPU core, 2 x AMD EPYC", "2026-11-21 09:30:00")
    assert find_people(files, runs)[2][2] == "1"


@pytest.mark.parametrize(
    "people, notes",
    [
        ({"anna": "xxx"}, ["there 3 times, counts once"]),
        ({"anna": "xyx", "ben": "z"}, ["anna: there 2 times, counts once"]),
        (
            {"anna": "x", "ben": "x", "carl": "xx"},
            ["there 4 times (anna, ben, carl), counts once"],
        ),
        ({"anna": "xy", "ben": "yx"}, ["there 2 times (anna, ben), counts once"]),
        ({"anna": "xy", "ben": "z"}, []),
    ],
)
def test_a_note_on_what_is_there_several_times(people, notes, tmp_path):
    """A row has it once, and of whom it is true if not of all."""
    runs = {name: line(NAME, 1, 80 + n) for n, name in enumerate("xyz")}
    files = {who: [runs[name] for name in text] for who, text in people.items()}
    ((row,),) = compare(read_runs(hand_in(tmp_path, **files))).values()
    assert row["notes"] == notes and row["runs"] == len({*"".join(people.values())})


def test_since_and_names_of_several_files(tmp_path):
    late = "2026-11-22T09:00:00+0100"
    lines = [line(NAME, 1, 100), line(NAME, 1, 90, finished=late)]
    hand_in(tmp_path, **{"Åsa": lines, "李": lines[:1], "Ødegård": lines})
    command = [sys.executable, f"{REPOSITORY}/bench/compare.py", tmp_path]
    done = run([*command, "--since", "2026-11-22", "--html", "x.html"], tmp_path)
    assert done.returncode == 0, done.stderr
    assert "90.0" in done.stdout and "100.0" not in done.stdout
    assert "there 2 times (Åsa, Ødegård), counts once" in done.stdout
    people = (tmp_path / "x.html").read_text("utf-8").split("Handed in")[1]
    rows = dict(re.findall(r'"row">(.*?)</th><td>.*?</td><td>(.*?)</td>', people))
    one = "1, of these also in another file: 1"
    assert rows == {"Åsa": one, "Ødegård": one, "李": "0"}


@pytest.mark.parametrize(
    "files, names",
    [
        ("logs/results.jsonl", ""),
        ("anna/results.jsonl ben/results.jsonl", "anna ben"),
        ("anna.jsonl ben.jsonl results.jsonl", "anna ben results"),
        ("c/anna/x/logs/results.jsonl c/ben/results.jsonl", "anna ben"),
        ("a/1/r.jsonl a/2/r.jsonl b/3/r.jsonl", "1 2 3"),
        ("anna/x/r.jsonl anna/y/r.jsonl ben/x/r.jsonl", "anna/x anna/y ben/x"),
        ("results.jsonl anna/results.jsonl", "results anna"),
        ("a.jsonl a.json", "a.jsonl a.json"),
    ],
)
def test_who_handed_in(files, names):
    assert tell_apart(files.split()) == (names.split() or [""])


def test_files_and_folders_are_read_once(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    hand_in(tmp_path, anna=["x"], ben=["x"])
    both = ["anna/results.jsonl", "ben/results.jsonl"]
    assert find_files(["anna", "ben", str(tmp_path), both[1]]) == both
    (tmp_path / "carl").mkdir()
    assert find_files(["carl"]) == ["carl/results.jsonl"]  # which cannot be read


def test_what_is_no_run_is_named(tmp_path, capsys):
    good = line(NAME, 1, 100)
    odd = [good | {"gpus": n} for n in (0, 2.5, "2", 10**400, None)]
    odd += [good | {"script": 3}, good | {"options": []}, [good], "[" * 9999]
    odd += [good | {"images_per_second": 10**400}, good | {"accuracy": "high"}]
    files = hand_in(tmp_path, anna=[good], ben=["%PDF", "x"], carl=["", good])
    for number, one in enumerate(odd):
        files += hand_in(tmp_path / "odd" / str(number), x=[good, one])
    files += [str(tmp_path / "dora.jsonl")]
    left_out = []
    assert len(read_runs(files, left_out=left_out)) == 1
    assert len(left_out) == len(odd) + 3  # and the empty line
    assert f"no run in {files[1]}: left out" in left_out
    assert left_out[-1].startswith(f"cannot read {files[-1]}: No such file")
    warned = capsys.readouterr().err.splitlines()
    assert warned == [f"Warning: {text}" for text in left_out]


EVIL = "<script>alert(1)</script>"


def test_the_page(tmp_path):
    """One file, which loads nothing, and in which no text of others is a tag."""
    bad = line(EVIL, 2, 50, torch=f"{EVIL}$x$", cpu=f"\x1b[31m{EVIL}")
    bad["options"] |= {f'"{EVIL}{{': f"'{EVIL}\n"}
    pair = [line(NAME, 1, 100), line(f"{NAME}_multigpu", 2, 150)]
    for one, lr in zip(pair, (1, r"$\frac$"), strict=True):  # in the plot's legend
        one["options"]["lr"] = lr
    hand_in(
        tmp_path / "in",
        anna=pair,
        ben=[bad, bad | {"finished": "2026-11-21T10:00:00"}, EVIL],
    )
    (tmp_path / "in" / "<b>carl").mkdir()
    page = tmp_path / "new/class.html"
    command = [sys.executable, f"{REPOSITORY}/bench/compare.py", "--html", page]
    done = run([*command, *sorted((tmp_path / "in").iterdir())], tmp_path)
    assert done.returncode == 0 and f"Page saved to {page}" in done.stdout
    assert "\x1b" not in done.stdout + done.stderr
    text = page.read_text()
    tags = re.findall(r"<(\w+)([^>]*)>", text)
    assert {name for name, _ in tags}.isdisjoint({"script", "b", "link", "iframe"})
    assert text.count("&lt;script&gt;") > 5 and "<b>carl" not in text
    assert not re.search(r"(src|href)=.(?!data:)", text)
    assert text.count("<caption>") == text.count("<table") == 3
    heads = [more for name, more in tags if name == "th"]
    assert heads and {*heads} == {' scope="col"', ' scope="row"'}
    (image,) = [more for name, more in tags if name == "img"]
    assert "1.50 on 2" in image and 'src="data:image/png;base64,iVBOR' in image
    assert "cannot read" in text and "&lt;b&gt;carl" in text  # who has handed in 0
    done = run([*command[:-1], "/dev/null/x.html", tmp_path / "in/anna"], tmp_path)
    assert done.returncode == 2 and "cannot write /dev/null/x.html" in done.stderr


def test_a_script_whose_name_begins_like_no_number():
    lines, notes = tabulate(*compare([prepare(line("nano", 1, 5))]).values())
    assert lines[1][0] == "nano" and not notes
