"""The clinic's patients under the checkup, and its flight recorder."""

import os
import pickle
import re
import sys

import pytest
from conftest import REPOSITORY, copy_exercise, fails, run, slow
from run_ranks import Run
from test_checkup import checkup, failed

FAILED_CHECKS = """set-epoch seeds gradients split coverage files collectives
eval-coverage,own-number unused-parameters shards clipping collectives"""


@pytest.mark.parametrize(
    "number, checks",
    [
        (n, checks) if n in (1, 8, 9) else slow(n, checks)
        for n, checks in enumerate(FAILED_CHECKS.split(), start=1)
    ],
)
def test_patients(number, checks, tmp_path):
    """Every patient fails the checks of its bug; its solution fails none."""
    clinic, per_node = REPOSITORY / "clinic", 2
    script = clinic / f"patient{number}.py"
    if number == 5:  # its bug shows on two nodes only
        _, output, status = checkup(tmp_path, script)
        assert status == 0, output
        per_node = 1
    states, output, status = checkup(tmp_path, "--strict", script, per_node=per_node)
    assert status == 1 and failed(states) == {*checks.split(",")}, output
    solution = clinic / "solutions" / script.name
    states, output, status = checkup(
        tmp_path, "--strict", solution, per_node=per_node
    )
    assert status == 0 and not failed(states), output


@pytest.mark.slow
def test_patient_6_goes_on_as_without_a_stop_after_the_fix(tmp_path):
    for folder, alike in (("clinic", False), ("clinic/solutions", True)):
        ends = []
        for options in ("--epochs=6", "--epochs=2", "--epochs=6 --resume"):
            script = REPOSITORY / folder / "patient6.py"
            job = Run(tmp_path, "", script, *options.split(), ranks=2)
            assert job.join() == [0, 0], job.output()
            ends.append(job.output().splitlines()[-1])
        assert ends[0].startswith("Epoch 6: loss ")
        assert (ends[0] == ends[2]) == alike, ends


@pytest.mark.slow
def test_flight_recorder_shows_where_the_ranks_wait(tmp_path):
    clinic = copy_exercise("clinic", tmp_path)
    command = "bash run-2gpus.sh flight_recorder.py patient7.py"
    done = run(command.split(), clinic)
    assert done.returncode == 1, done.stderr
    lines = (clinic / "patient7.py").read_text().splitlines()
    forward = lines.index("        answers = model(images.to(device)).argmax(dim=1)")
    (reduce,) = [i for i, line in enumerate(lines) if "dist.all_reduce(" in line]
    shown = run([sys.executable, "flight_recorder.py"], clinic).stdout
    for rank, name, index in ((0, "broadcast", forward), (1, "all_reduce", reduce)):
        line = rf"rank_{rank}: 103 gloo:{name} .* at patient7.py:{index + 1}$"
        assert re.search(line, shown, re.M), shown
    analyser = "-m", "torch.distributed.flight_recorder.fr_trace"
    done = run([sys.executable, *analyser, "logs/flight_recorder"], clinic)
    found = (
        "103 has errors.*_TYPE_MISMATCH.*(broadcast.*all_reduce|reduce.*broadcast)"
    )
    assert re.search(found, done.stdout + done.stderr, re.S)


class Malicious:
    def __reduce__(self):
        return os.system, ("touch ran",)


@pytest.mark.slow
def test_flight_recorder_runs_no_code_and_names_mistakes(tmp_path):
    clinic = copy_exercise("clinic", tmp_path)
    command = [sys.executable, "flight_recorder.py"]
    fails(run(command, clinic), "no logs/flight_recorder/; run `sbatch run-2gpus.sh")
    missing = run([*command, "none.py"], clinic)
    fails(missing, "no script none.py; give the path of a")
    file = clinic / "logs/flight_recorder/rank_0"
    file.parent.mkdir(parents=True)
    file.write_bytes(pickle.dumps({"entries": [Malicious()]}))
    done = run(command, clinic)
    fails(
        done, "not a trace (UnpicklingError: it would import posix.system); delete"
    )
    assert not (clinic / "ran").exists()
