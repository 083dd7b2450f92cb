"""The checkup: nothing is said of a healthy script, and each bug has its own check.

The clinic's patients have the bugs that are not in checkup_cases.py.
test_checkup_programs.py tries programs as others write them.
"""

import json
import re

import pytest
import torch
from checkup_cases import BUGS, HEALTHY, SCRIPT, UNSEEN, changed, read_cases
from fork_ranks import Run


def read_report(folder):
    """Return {name of a check: its state}."""
    file = folder / "rows.json"
    text = file.read_text() if file.exists() else ""
    rows = json.loads(text)["checks"] if text else []
    return {row["name"]: row["state"] for row in rows}


def names(states, *wanted):
    return {name for name, state in states.items() if state in wanted}


def checkup(folder, *words, ranks=2, **job):
    """Return (states, output, status) of a script under the checkup."""
    path = "clinic/../tools/checkup/__main__.py"  # as in ../tools/checkup
    command = path, "--json=rows.json", *words
    job = Run(folder, "", *command, ranks=ranks, **job)
    status = max(job.join())
    return read_report(folder), job.output(0) + job.output(1), status


def check(script, folder, *options):
    """Write a script, and return what checkup() does."""
    (folder / "script.py").write_text(script)
    # Both ranks write its __pycache__.
    (folder / "helper.py").write_text("class Item:\n    pass\n")
    return checkup(folder, *options, "script.py")


@pytest.mark.parametrize("title, unseen, changes", read_cases(BUGS))
def test_bugs(title, unseen, changes, tmp_path):
    name, level = f"{title} error".split()[:2]
    states, output, status = check(changed(changes), tmp_path)
    assert names(states, "error", "warning", "advice") == {name}, output
    assert (states[name], status) == (level, level == "error")
    line = r"script\.py:\d+|at the end|rank"
    assert re.search(rf" {name} .*({line}).*\n +Fix: ", output), output


@pytest.mark.slow
@pytest.mark.parametrize("style, unseen, changes", read_cases(HEALTHY))
def test_healthy_styles(style, unseen, changes, tmp_path):
    states, output, status = check(changed(changes), tmp_path)
    assert status == 0 and not names(states, "error", "warning", "advice"), output
    assert names(states, "not seen") == {*UNSEEN, *unseen}, output


def test_it_changes_no_weights_and_can_stop_early(tmp_path):
    """A run under it has the weights of one without, to the bit."""
    states, output, status = check(SCRIPT, tmp_path)
    assert status == 0 and names(states, "not seen") == UNSEEN, output
    watched = torch.load(tmp_path / "model.pt")
    assert Run(tmp_path, "", tmp_path / "script.py", ranks=2).join() == [0, 0]
    alone = torch.load(tmp_path / "model.pt")
    assert all(torch.equal(alone[name], watched[name]) for name in alone)
    (tmp_path / "model.pt").unlink()
    states, output, status = check(SCRIPT, tmp_path, "--steps", 5)
    assert status == 0 and "2 ranks, 5 steps" in output, output
    assert not (tmp_path / "model.pt").exists()
    assert names(states, "not seen") > {"eval-coverage"}, output


def test_a_script_that_fails(tmp_path):
    fails = ("    accuracy = evaluate()", "    accuracy = evaluate()[rank]")
    states, output, status = check(changed([fails]), tmp_path)
    assert status == 1 and not names(states, "error", "warning"), output
    assert "TypeError: 'float' object is not subscriptable" in output
    assert "failed. The report is about the steps before." in output


def test_levels_change_the_status(tmp_path):
    no_seed = changed([("torch.manual_seed(rank)", "torch.manual_seed(0)")])
    _, output, status = check(no_seed, tmp_path, "--strict")
    assert status == 1 and "Errors: 0, warnings: 1" in output, output
    states, _, status = check(no_seed, tmp_path, "--strict", "--ignore=seeds")
    assert status == 0 and states["seeds"] == "ignored"


@pytest.mark.slow
def test_ends_without_a_report_are_no_success(tmp_path):
    """os._exit(0) is no way around it, and a rank that is killed ends the job."""
    own = ("    dist.all_reduce(sums)", "")
    exits = ("dist.destroy_process_group()", "os._exit(0)")
    states, output, status = check(changed([own, exits]), tmp_path)
    assert (states["own-number"], status) == ("error", 1), output
    assert re.search(r"\(rank 0: [\d.]+, rank 1: [\d.]+\)", output), output
    kill = "    dist.barrier()\n    if rank and epoch: os.kill(os.getpid(), 9)"
    changes = ("    accuracy = evaluate()", kill), ("accuracy {accuracy:.4f}", "")
    states, output, status = check(changed(changes), tmp_path)
    assert status == 1 and "Rank 0 failed." in output, output


@pytest.mark.slow
def test_a_hang_names_both_sides(tmp_path):
    wait = "    dist.recv(torch.ones(1)) if rank else dist.barrier()\n"
    call = "    accuracy = evaluate()"
    script = changed([(call, wait + call)])
    states, output, status = check(script, tmp_path, "--hang-timeout=8")
    assert (states["collectives"], status) == ("error", 1), output
    line = r"at script.py:\d+"
    text = f"rank 0 is in barrier {line}, rank 1 is in recv {line}"
    assert re.search(text, output), output
