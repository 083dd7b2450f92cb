"""rehearse.py: which commands it takes from a README, and what it says of them."""

import re
import sys

import pytest
import rehearse
from conftest import EXERCISES, REPOSITORY, run
from test_readmes import BEYOND, blocks
from test_terminal import on_terminal

LESSONS = [*EXERCISES, "dp_ddp_intro/beyond_ddp"]
FENCED = "\n```bash\n{}\n```\n"
RUN = '#!/bin/bash\n#SBATCH --nodes=1\n#SBATCH --gpus-per-node=2\nset -e\n"$@"\n'
TEXT = """
JobId=7 JobName=a b JobState={} ExitCode={} SubmitTime=2026-11-21T23:59:00
EligibleTime=2026-11-21T23:59:00 StartTime={}
EndTime=2026-11-22T01:02:03 Partition=gpu NumNodes=2 CPUs/Task=1 ReqB:S:C:T=0:0:*:*
StdErr=/a folder/7.err StdOut=/a folder/7.out Power= TresPerNode={}
""".replace("\n", " ").lstrip()


@pytest.fixture
def lesson(tmp_path):
    """Return a function that writes a room of this README, and rehearses it."""
    (tmp_path / "room").mkdir()
    (tmp_path / "bench").symlink_to(REPOSITORY / "bench")
    (tmp_path / "room/run.sh").write_text(RUN)
    (tmp_path / "room/unused.sh").write_text(RUN)

    def write(text, *options):
        (tmp_path / "room/README.md").write_text(text)
        script = tmp_path / "bench/rehearse.py"
        return [sys.executable, str(script), "room", "--no-slurm", *options]

    return write


@pytest.mark.parametrize("name", LESSONS)
def test_it_takes_the_commands_of_a_readme(name):
    file = BEYOND if "beyond" in name else f"{name}/README.md"
    jobs, left_out = rehearse.read_jobs(REPOSITORY / file, ["", "takes long"], True)
    commands = [(mark, c) for mark, found in blocks(file) for c in found]
    commands = [(mark, c) for mark, c in commands if re.search(r"sbatch .*\.sh", c)]
    taken = [c for mark, c in commands if mark in (None, "takes long")]
    assert taken and len(taken) == len(jobs)
    assert len(jobs) + len(left_out) == len(commands)
    for job, typed in zip(jobs, taken, strict=True):
        assert job["text"].split()[:2] == typed.split()[:2]
        assert not re.search(r"\$SMALL\b", job["name"])
        assert not re.search(r"\$\w", job["text"]), "a variable is not known"
        assert (job["told"] > 0) == ("status" in typed)
    used = " ".join(job["text"] for job in jobs)
    assert all(f.name in used for f in (REPOSITORY / name).glob("*.sh"))


def test_without_small_a_student_has_a_gpu():
    readme = REPOSITORY / "clinic/README.md"
    small, whole = (rehearse.read_jobs(readme, [""], small)[0] for small in (1, 0))
    assert "--sequences 256" in small[-1]["text"]
    assert whole[-1]["text"].rstrip().endswith("ddp_with_sampler.py")
    readme = REPOSITORY / "cinic_lab/README.md"
    _, left_out = rehearse.read_jobs(readme, ["", "needs a GPU"], False)
    assert [name.split()[1] for name in left_out if "LARGEST" in name] == [
        "cinic.py",
        "cinic_amp.py",
    ]


def test_by_bash(lesson, tmp_path):
    commands = (
        'SMALL="a b"\nX="$SMALL c"\nsbatch run.sh echo $X > said',
        "sbatch --gpus-per-node=4 run.sh \\\n    test -f said   # 15 s",
        'FROM=$(cat said)\nON="--resume $FROM"\nX=1 sbatch run.sh echo $ON >> said',
        "X=2 sbatch run.sh echo $ON >> said",
        "bash run.sh false",
        "sbatch run.sh false  # 15 s, status 1",
        "sbatch run.sh sh -c 'echo oh no; exit 3'",
        "sbatch run.sh sh -c 'kill -9 $$'",
    )
    text = "".join(map(FENCED.format, commands))
    text += "<!-- needs a network -->" + FENCED.format("sbatch run.sh curl")
    command = lesson(text, "--small", "--students", "20", "--gpus", "8")
    done = run(command, "/")
    lines = done.stdout.splitlines()
    assert done.returncode == 1 and done.stderr == "", done.stderr
    said = (tmp_path / "room/said").read_text()
    assert said == "a b c\n--resume a b c\n--resume a b c\n"  # $(...) once
    assert lines[0].endswith(" 1 running, 6 not started")
    assert lines[6].endswith(" 4 completed, 2 failed, 1 running")
    rows = [line.split(maxsplit=9) for line in lines if " x 1 " in line]
    states = ["completed"] * 4 + ["as", "failed", "failed"]
    assert [row[0] for row in rows] == states
    assert " 4 x 1 " in next(line for line in lines if line.endswith("test -f said"))
    log = tmp_path / "room/logs/rehearsal-6.out"
    failed = "Failed: run.sh sh -c 'echo oh no; exit 3'"
    assert lines[lines.index(failed) + 1] == f"    see {log}: oh no"
    assert "Left out: run.sh curl (needs a network)" in lines
    assert "Left out: unused.sh (no command has it)" in lines
    assert re.fullmatch(r"20 students: \d+ [CG]PU min", lines[-3])
    assert re.fullmatch(r"With 8 [CG]PUs: \d+ min at least", lines[-2])
    assert lines[-1] == "2 of 7 failed"
    assert " 137  run.sh sh -c 'kill -9 $$'" in lines[lines.index(failed) - 2]


def test_all_ran_well(lesson):
    done = run(lesson(FENCED.format("sbatch run.sh true")), "/")
    assert done.returncode == 0 and done.stdout.endswith("\nAll ran well\n")


def test_no_such_lesson():
    done = run([sys.executable, REPOSITORY / "bench/rehearse.py", "exercise9"], "/")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1 and "exercise8" in done.stderr


def test_a_bar_and_ctrl_c(lesson, tmp_path):
    text = "sbatch run.sh true\nsbatch run.sh sleep 30\nsbatch run.sh true"
    command = lesson(FENCED.format(text))
    status, shown = on_terminal(
        command, tmp_path, tmp_path, "1 completed, 1 running"
    )
    assert status == 1 and "|#######             | 1 completed, 1 running" in shown
    assert "Stopped by Ctrl-C" in shown and "2 of 3 failed" in shown
    assert "not started" in shown.split("command")[1] and "Traceback" not in shown


@pytest.mark.parametrize(
    "state, code, gpus, ended, number",
    [
        ("COMPLETED", "0:0", "gres:gpu:2", 0, 2),
        ("FAILED", "134:0", "gres:gpu:mi250:8", 134, 8),
        ("CANCELLED", "0:15", "gres/gpu:a100=4", 143, 4),
        ("TIMEOUT", "0:0", "(null)", 0, 0),
    ],
)
def test_what_slurm_says(state, code, gpus, ended, number, monkeypatch):
    text = TEXT.format(state, code, "2026-11-22T00:02:03", gpus)
    monkeypatch.setattr(rehearse, "output", lambda *command: text)
    job = {**rehearse.NEW, "id": "7"}
    rehearse.ask(job)
    assert (job["state"], job["exit"], job["gpus"]) == (state, ended, number)
    assert (job["waited"], job["took"], job["nodes"]) == (183, 3600, 2)
    assert str(job["log"]) == "/a folder/7.err"


@pytest.mark.parametrize(
    "answer, state",
    [
        ("slurm_load_jobs error: Invalid job id specified", "FORGOTTEN"),
        ("slurm_load_jobs error: Unable to contact slurm controller", "RUNNING"),
        (TEXT.format("PENDING", "0:0", "Unknown", "gres:gpu:2"), "PENDING"),
    ],
)
def test_what_slurm_does_not_say(answer, state, monkeypatch):
    monkeypatch.setattr(rehearse, "output", lambda *command: answer)
    job = {**rehearse.NEW, "id": "7", "state": "RUNNING"}
    rehearse.ask(job)
    assert job["state"] == state and job["took"] == 0
