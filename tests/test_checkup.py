"""The checkup, as the lessons start it; checkup/tests has its own tests."""

import json
import re
import shutil

import pytest
from conftest import REPOSITORY, copy_exercise, make_data, run, slow
from run_ranks import Run
from test_readmes import blocks

INTRO = "--layers=1 --width=16 --heads=2 --length=8 --sequences=64 --epochs=2"


def checkup(folder, *words, data="", **job):
    """Return ({check: state}, output, status) of a script on two ranks."""
    path = "clinic/../checkup/__main__.py"  # as in ../checkup
    command = path, "--json=rows.json", *words
    job = Run(folder, data, *command, ranks=2, **job)
    status, file = max(job.join()), folder / "rows.json"
    text = file.read_text() if file.exists() else ""
    rows = json.loads(text)["checks"] if text else []
    states = {row["name"]: row["state"] for row in rows}
    return states, job.output(0) + job.output(1), status


def failed(states):
    return {n for n, state in states.items() if state in ("error", "warning")}


def test_the_report_that_the_clinic_quotes(tmp_path):
    """Without the sampler all ranks train on the same samples; all else is well."""
    exercise = copy_exercise("dp_ddp_intro", tmp_path)
    words = "ddp_unfinished.py", *INTRO.split()
    states, output, status = checkup(exercise, *words)
    assert status == 1 and failed(states) == {"coverage"}, output
    rows = re.findall("  error +coverage .*\n.*\n", output)[0].splitlines()
    readme = (REPOSITORY / "clinic/README.md").read_text()
    assert all(row.strip() in readme for row in rows), rows


@pytest.mark.parametrize(
    "script",
    [
        "cinic_lab/cinic_ddp.py",
        slow("dp_ddp_intro/ddp.py"),
        slow("exercise8/solutions/strong_scaling.py"),
    ],
)
def test_the_command_of_a_lesson_passes_its_solution(script, sample, tmp_path):
    lesson = script.split("/")[0]
    exercise = copy_exercise(lesson, tmp_path)
    if lesson == "exercise8":  # as many photos as its reader has
        sample = make_data(tmp_path / "data", 1, [lesson])
    commands = [c for _, block in blocks(f"{lesson}/README.md") for c in block]
    (command,) = [c for c in commands if "../checkup" in c and "my_" in c]
    shutil.copy(tmp_path / script, exercise / re.search(r"my_\w+\.py", command)[0])
    command = command.replace("sbatch", "bash")
    if lesson == "cinic_lab":  # its sample is a tenth, too
        command += " --batch-size 24"
    done = run(["bash", "-c", command], exercise, sample)
    assert done.returncode == 0, done.stdout + done.stderr
    assert lesson == "cinic_lab" or re.search("ok +reference ", done.stdout)
