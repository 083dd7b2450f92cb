"""The clinic's patients, and the checkup of the repository's own scripts."""

import json
import os
import pickle
import re
import sys

import pytest
from conftest import REPOSITORY, copy_exercise, fails, run
from fork_ranks import Run

CHECKUP = "tools/checkup/__main__.py"
INTRO = "--layers=1 --width=16 --heads=2 --length=8 --sequences=64 --epochs=2"


def checkup(script, folder, *options, per_node=2):
    """Return (states, output, status) of a run under the checkup."""
    command = [CHECKUP, "--json=rows.json", *options, script]
    job = Run(folder, "", *command, ranks=2, per_node=per_node)
    status, file = max(job.join()), folder / "rows.json"
    rows = json.loads(file.read_text()) if file.exists() else []
    states = {row["name"]: row["state"] for row in rows}
    return states, job.output(0) + job.output(1), status


def test_it_is_started_by_a_run_script_of_another_exercise(tmp_path):
    exercise = copy_exercise("dp_ddp_intro", tmp_path)
    (tmp_path / "clinic").symlink_to(REPOSITORY / "clinic")
    command = "bash jobscript_ddp.sh ../tools/checkup ddp.py --batch-size=8"
    done = run([*command.split(), *INTRO.split()], exercise)
    assert done.returncode == 0, done.stderr
    assert "Checkup of ddp.py: 2 ranks, 8 steps" in done.stdout


FAILED_CHECK = {
    1: "set-epoch",
    2: "seeds",
    3: "gradients",
    4: "split",
    5: "coverage",
    6: "files",
    7: "rank0-eval",
    8: "collectives",
    9: "unused-parameters",
}


@pytest.mark.parametrize(
    "number",
    [
        1,
        5,
        8,
        9,
        *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 3, 4, 6, 7)),
    ],
)
def test_patients(number, tmp_path):
    """Each patient fails one check; its solution fails none."""
    clinic, name = REPOSITORY / "clinic", f"patient{number}.py"
    per_node = 1 if number == 5 else 2  # its bug shows on two nodes only
    for folder, expected in (
        (clinic, {FAILED_CHECK[number]}),
        (clinic / "solutions", set()),
    ):
        script = folder / name
        states, output, status = checkup(
            script, tmp_path, "--strict", per_node=per_node
        )
        bad = {n for n, state in states.items() if state in ("error", "warning")}
        assert bad == expected, output
        assert status == len(expected)
    if number == 5:
        _, output, status = checkup(clinic / name, tmp_path)
        assert status == 0, output


@pytest.mark.parametrize(
    "single, state, text",
    [
        ("single.py --batch-size 8", "ok", "of its first loss apart"),
        ("single.py --lr 0.1", "error", "of its first loss apart"),
        ("single.py --heads 3", "error", "single.py failed, see above"),
    ],
)
def test_losses_against_those_of_one_gpu(single, state, text, tmp_path):
    exercise = copy_exercise("dp_ddp_intro", tmp_path)
    command = [CHECKUP, "--reference", single, "--tolerance", 0.02]
    command += ["ddp.py", "--batch-size=4", *INTRO.split()]
    job = Run(exercise, "", *command, ranks=2)
    assert job.join() == [state == "error"] * 2, job.output()
    row = rf"^  {state} +reference +the losses are those of the reference\s.*{text}"
    assert re.search(row, job.output(), re.M | re.S), job.output()


@pytest.mark.slow
def test_flight_recorder_shows_where_the_ranks_wait(tmp_path):
    clinic = copy_exercise("clinic", tmp_path)
    command = "bash run-2gpus.sh flight_recorder.py patient7.py"
    # Without tests/rules, whose functions are between the script and torch.
    done = run(command.split(), clinic, PYTHONPATH="")
    assert done.returncode == 1, done.stderr
    lines = (clinic / "patient7.py").read_text().splitlines()
    forward = lines.index("        output = model(normalise(images, MEAN, STD))", 60)
    reduce = lines.index("        dist.all_reduce(sums)")
    shown = run([sys.executable, "flight_recorder.py"], clinic).stdout
    for rank, name, index in ((0, "broadcast", forward), (1, "all_reduce", reduce)):
        line = rf"rank_{rank}: 103 gloo:{name} .* at patient7.py:{index + 1}$"
        assert re.search(line, shown, re.M), shown
    analyser = "-m", "torch.distributed.flight_recorder.fr_trace"
    done = run([sys.executable, *analyser, "logs/flight_recorder"], clinic)
    for text in (
        "number: 103 has errors",
        "_TYPE_MISMATCH",
        "broadcast",
        "all_reduce",
    ):
        assert text in done.stdout + done.stderr


class Malicious:
    def __reduce__(self):
        return os.system, ("touch ran",)


def test_flight_recorder_runs_no_code_and_names_mistakes(tmp_path):
    clinic = copy_exercise("clinic", tmp_path)
    command = [sys.executable, "flight_recorder.py"]
    fails(run(command, clinic), "no logs/flight_recorder/; run `sbatch run-2gpus.sh")
    fails(
        run([*command, "none.py"], clinic), "no script none.py; give the path of a"
    )
    file = clinic / "logs/flight_recorder/rank_0"
    file.parent.mkdir(parents=True)
    file.write_bytes(pickle.dumps({"entries": [Malicious()]}))
    done = run(command, clinic)
    assert "UnpicklingError: it would import posix.system" in done.stderr
    assert not (clinic / "ran").exists()
