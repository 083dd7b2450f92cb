"""rehearse.py: which commands it takes from a README, and what it says of them."""

import os
import re
import signal
import subprocess
import sys
import time

import pytest
import rehearse
from conftest import EXERCISES, REPOSITORY, run
from test_readmes import BEYOND, blocks
from test_terminal import on_terminal

LESSONS = [*EXERCISES, "dp_ddp_intro/beyond_ddp"]
FENCED = "\n```bash\n{}\n```\n"
RUN = '#!/bin/bash\n#SBATCH --nodes=1\n#SBATCH --gpus-per-node=2\nset -e\n"$@"\n'
TEXT = """
JobId=7 JobName=a b JobState={} Reason={} ExitCode={} SubmitTime=2026-11-21T23:59:00
EligibleTime=2026-11-21T23:59:00 StartTime={}
EndTime={} Partition=gpu NumNodes=2 CPUs/Task=1 ReqB:S:C:T=0:0:*:*
StdErr=/a folder/7.err StdOut=/a folder/7.out Power= TresPerNode={}
""".replace("\n", " ").lstrip()
TIMES = "2026-11-22T00:02:03", "2026-11-22T01:02:03"
# sbatch run.sh STATE[:REASON] ...: what scontrol says of this job, one at a time.
SLURM = f"""#!/bin/bash
at=$(dirname "$0")
case $(basename "$0") in
sbatch)
    touch "$at/asked"
    sleep ${{SLOW:-0}}
    jobs=("$at"/job-*)
    if [[ $* == *--gpus-per-node=9* ]]; then
        echo "sbatch: error: too many GPUs" >&2
    elif [[ -e $jobs ]] && (( ${{#jobs[@]}} >= ${{MOST:-99}} )); then
        echo "sbatch: error: QOSMaxSubmitJobPerUserLimit" >&2
    else
        number=$(( $(cat "$at/number" 2> /dev/null) + 1 ))
        echo $number > "$at/number"
        echo "${{@:2}}" > "$at/job-$number"
        echo "Submitted batch job $number"
        exit
    fi
    exit 1;;
scontrol)
    read -r said rest < "$at/job-$4"
    [[ ! $rest ]] || echo "$rest" > "$at/job-$4"
    state=${{said%:*}} reason=None
    [[ $said != *:* ]] || reason=${{said#*:}}
    [[ $state != C*ED && $state != TIMEOUT ]] || rm "$at/job-$4"
    echo "{TEXT.format("$state", "$reason", "0:0", *TIMES, "gres:gpu:2")}";;
scancel)
    for number in "$@"; do echo COMPLETING > "$at/job-$number"; done;;
sinfo)
    [[ $* != *"-p gpu "* ]] || printf "%s\n" \
        "idle 2 gpu:a100:4(S:0-1),gpu:v100:2" "mixed 1 gpu:mi250:3" "idle* 9 gpu:8" \
        "reserved 1 gpu:1" "down* 5 gpu:8" "drained 1 gpu:8" "idle 7 (null)";;
esac
"""


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


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """A Slurm of one file: see SLURM."""
    (tmp_path / "bin").mkdir()
    for name in ("sbatch", "scontrol", "scancel", "sinfo"):
        (tmp_path / "bin" / name).write_text(SLURM)
        (tmp_path / "bin" / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin", prepend=":")


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
        assert (job["told"] != {0}) == ("status" in typed)
    used = " ".join(job["text"] for job in jobs)
    assert all(f.name in used for f in (REPOSITORY / name).glob("*.sh"))


def test_without_small_a_student_has_a_gpu():
    readme = REPOSITORY / "clinic/README.md"
    small, whole = (rehearse.read_jobs(readme, [""], small)[0] for small in (1, 0))
    assert "--sequences 256" in small[-1]["text"]
    assert whole[-1]["text"].rstrip().endswith("ddp_with_sampler.py")
    readme = REPOSITORY / "cinic_lab/README.md"
    _, left_out = rehearse.read_jobs(readme, ["", "needs a GPU"], False)
    larger = [name for name in left_out if "LARGEST" in name]
    assert [name.split()[1] for name in larger] == ["cinic.py", "cinic_amp.py"]
    why = " (with the batch that the student finds)"
    assert all(name.endswith(why) for name in larger)


@pytest.mark.parametrize(
    "comment, told",
    [("", {0}), ("# 15 s", {0}), ("# 15 s, status 134, or 1 by NCCL", {134, 1})],
)
def test_a_comment_names_a_status_or_several(comment, told, tmp_path):
    readme = tmp_path / "README.md"
    readme.write_text(FENCED.format(f"sbatch run.sh x.py  {comment}"))
    ((job,), _) = rehearse.read_jobs(readme, [""], True)
    assert job["told"] == told


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
    assert re.fullmatch(r"20 students: at least \d+ [CG]PU min", lines[-3])
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


def test_nothing_to_submit(lesson):
    text = "<!-- needs an account -->" + FENCED.format("sbatch run.sh true")
    done = run(lesson(text), "/")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(
        "Error: nothing to submit; left out: run.sh true ("
    )
    assert done.stderr.count("\n") == 1


def test_run_scripts_of_its_own_or_of_the_folder_above(lesson, tmp_path):
    text = FENCED.format("sbatch run.sh touch here")
    command = lesson(text)
    for name, own in (("own", True), ("none", False)):
        folder = tmp_path / "room" / name
        folder.mkdir()
        (folder / "README.md").write_text(text)
        if own:
            (folder / "run.sh").write_text(RUN)
        command[2] = f"room/{name}"
        done = run(command, "/")
        assert done.returncode == 0, done.stderr
        assert (folder / "here").exists() == own
    assert (tmp_path / "room/here").exists()


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
        ("NODE_FAIL", "1:0", "gres:gpu:a100:2,gres:gpu:v100:1", 1, 3),
    ],
)
def test_what_slurm_says(state, code, gpus, ended, number, monkeypatch):
    text = TEXT.format(state, "Why", code, *TIMES, gpus)
    monkeypatch.setattr(rehearse, "output", lambda *command: text)
    job = {**rehearse.NEW, "id": "7"}
    rehearse.ask(job)
    assert (job["state"], job["exit"], job["gpus"]) == (state, ended, number)
    assert (job["waited"], job["took"], job["nodes"]) == (183, 3600, 2)
    assert str(job["log"]) == "/a folder/7.err" and not job["live"]
    assert job["why"] == "no log; Slurm's reason: Why" and job["note"] == ""


@pytest.mark.parametrize("ended", [True, False])
def test_what_has_ended_and_what_is_alive(ended, monkeypatch):
    over = "BOOT_FAIL DEADLINE OUT_OF_MEMORY PREEMPTED REVOKED"
    alive = "PENDING CONFIGURING RUNNING COMPLETING SUSPENDED REQUEUED REQUEUE_HOLD "
    alive += "RESIZING SIGNALING SPECIAL_EXIT STAGE_OUT STOPPED"
    for state in (over if ended else alive).split():
        text = TEXT.format(state, "Why", "0:0", TIMES[0], "Unknown", "gres:gpu:2")
        monkeypatch.setattr(rehearse, "output", lambda *command, text=text: text)
        job = {**rehearse.NEW, "id": "7", "live": True}
        rehearse.ask(job)
        assert (job["state"], job["live"], job["took"]) == (state, not ended, 0)
        assert (job["note"] == " (Why)") == (not ended)


@pytest.mark.parametrize(
    "answer, silent, state, note",
    [
        (
            "slurm_load_jobs error: Invalid job id specified",
            0,
            "FORGOTTEN",
            "Invalid",
        ),
        ("slurm_load_jobs error: Unable to contact", 599, "RUNNING", "Unable to"),
        ("slurm_load_jobs error: Unable to contact", 601, "FORGOTTEN", "Unable to"),
        ("", 0, "RUNNING", ""),
    ],
)
def test_what_slurm_does_not_say(answer, silent, state, note, monkeypatch, capsys):
    monkeypatch.setattr(rehearse, "output", lambda *command: answer)
    heard = time.time() - silent
    job = {**rehearse.NEW, "id": "7", "state": "RUNNING", "heard": heard}
    rehearse.ask(job)
    assert job["state"] == state and job["took"] == 0
    assert job["live"] == (state == "RUNNING")
    assert ("sacct -j 7" in job["why"]) == (not job["live"])
    rehearse.show([job])
    assert note in capsys.readouterr().out


@pytest.mark.parametrize(
    "unit, each, both", [("GPU min", 8, 12), ("CPU min", 0.5, 2)]
)
def test_what_it_costs_and_what_failed(unit, each, both, capsys):
    job = {**rehearse.NEW, "name": "x", "told": {0}, "state": "COMPLETED", "exit": 0}
    job |= {"took": 120, "gpus": 2, "nodes": 2, "cpu": 30}
    late = {**job, "state": "TIMEOUT", "nodes": 1, "cpu": 90, "why": "it took long"}
    assert rehearse.report([job, late], unit) == (1, both)
    said = capsys.readouterr().out
    rows = [line.split() for line in said.splitlines() if " s " in line]
    assert [row[-3] for row in rows[:2]] == [f"{each:.2f}", f"{both - each:.2f}"]
    assert rows[2] == ["together", "240", "s", f"{both:.2f}"]
    assert said.endswith("\nFailed: x\n    it took long\n")


@pytest.mark.parametrize("told, state", [({0}, "failed"), ({134, 1}, "as told")])
def test_as_told(told, state, capsys):
    job = {**rehearse.NEW, "name": "x", "told": told, "state": "FAILED", "exit": 1}
    assert rehearse.report([job], "GPU min")[0] == (told == {0})
    assert f"\n{state} " in capsys.readouterr().out
    job |= {"state": "COMPLETED", "exit": 0}
    assert rehearse.report([job], "GPU min")[0] == (told != {0})


def test_slurm_refuses_holds_and_cancels(lesson, slurm):
    """The first job is refused; of the others it takes one at a time."""
    jobs = (
        "sbatch --gpus-per-node=9 run.sh",
        "sbatch run.sh PENDING:QOSMaxGRESPerUser COMPLETED",
        "sbatch run.sh REQUEUED CANCELLED:JobHeldUser",
    )
    command = lesson(FENCED.format("\n".join(jobs)), "--students", "20")
    command.remove("--no-slurm")
    done = run(command, "/", MOST="1")
    assert done.returncode == 1 and done.stderr == ""
    lines = done.stdout.splitlines()
    held = " 1 refused, 1 pending (QOSMaxGRESPerUser), 1 not started"
    assert any(line.endswith(held) for line in lines), done.stdout
    assert any(line.endswith(" 1 completed, 1 requeued") for line in lines)
    rows = [line.split() for line in lines if " x " in line]
    assert [row[0] for row in rows] == ["refused", "completed", "cancelled"]
    why = [lines[n + 1].strip() for n, li in enumerate(lines) if li[:7] == "Failed:"]
    refused = "sbatch: error: too many GPUs"
    assert why == [refused, "no log; Slurm's reason: JobHeldUser"]
    assert "20 students: at least 9600 GPU min" in lines  # an hour of 2 x 2, twice
    assert "With 16 GPUs: 600 min at least" in lines


def test_ctrl_c_while_sbatch_runs_and_once_more(lesson, slurm, tmp_path):
    """The job is cancelled though its number came later; then the wait is ended."""
    command = lesson(FENCED.format("sbatch run.sh RUNNING\nsbatch run.sh RUNNING"))
    command.remove("--no-slurm")
    child = subprocess.Popen(
        command,
        env={**os.environ, "SLOW": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    deadline = time.monotonic() + 60
    while not (tmp_path / "bin/asked").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    os.killpg(child.pid, signal.SIGINT)  # to all, as a terminal does
    for line in child.stdout:
        if line.startswith("Cancelled jobs 1"):
            break
    os.killpg(child.pid, signal.SIGINT)
    said = child.stdout.read()
    assert child.wait() == 1 and "Traceback" not in said
    assert (tmp_path / "bin/job-1").read_text() == "COMPLETING\n"
    assert said.endswith("\n2 of 2 failed\n") and " command\n" in said
