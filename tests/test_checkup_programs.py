"""The checkup of foreign programs and of lessons' scripts, and its command line.

tests/programs/ holds healthy programs in many styles. If the line after a comment
`# BUG name: replacement` is replaced, the program has a bug that the check finds.
"""

import importlib
import re
import shutil
import sys
import sysconfig
import textwrap

import pytest
from conftest import REPOSITORY, copy_exercise, make_data, run, slow
from fork_ranks import Run, free_port
from test_checkup import checkup, names, read_report
from test_readmes import blocks

PROGRAMS = REPOSITORY / "tests/programs"


def cases(frameworks):
    """Yield (name, bug, lines, what replaces them) for each program.

    One bug of each program is enough for every day.
    """
    for file in sorted(PROGRAMS.glob("**/*.py")):
        name, part = str(file.relative_to(PROGRAMS)), file.name == "engine.py"
        if name.startswith("frameworks") == frameworks and "__init__" not in name:
            bugs = re.finditer(r"( *)# BUG ([\w -]+): (.*)\n.*", file.read_text())
            changes = [("", "", "")] * (not part)
            changes += [(bug[2], bug[0], bug[1] + bug[3]) for bug in bugs]
            for i, change in enumerate(changes, start=part):
                seldom = [pytest.mark.slow] * (i > 1 or name == "spawned.py")
                title = f"{file.stem}-{i}-{change[0] or 'healthy'}"
                yield pytest.param(name, *change, id=title, marks=seldom)


def write_programs(folder, name, old, new):
    """Copy all programs, with these lines of one of them replaced."""
    shutil.copytree(PROGRAMS, folder, dirs_exist_ok=True)
    (folder / name).write_text((PROGRAMS / name).read_text().replace(old, new))


@pytest.mark.parametrize("name, bug, old, new", [*cases(False)])
def test_foreign_programs(name, bug, old, new, tmp_path):
    write_programs(tmp_path, name, old, new)
    words = ["-m", "trainer.main", "lr=0.1"] if "trainer" in name else [name]
    soon = ["--hang-timeout=2"] * (name in ("local_sgd.py", "sharded.py"))
    job = {"PORT": free_port(), "ranks": 0 if name == "spawned.py" else 2}
    states, output, status = checkup(tmp_path, *soon, *words, **job)
    assert states and names(states, "error", "warning") == {*bug.split()}, output
    assert status == ("error" in states.values()), output


@pytest.mark.slow
@pytest.mark.parametrize("name, bug, old, new", [*cases(True)])
def test_frameworks(name, bug, old, new, tmp_path):
    python = REPOSITORY / ".venv-frameworks/bin/python"
    if not python.exists():
        pytest.skip("run `make venv-frameworks`")
    write_programs(tmp_path, name, old, new)
    command = [python, REPOSITORY / "tools/checkup", "-n2", "--json=rows.json", name]
    env = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": ""}
    done, states = run(command, tmp_path, **env), read_report(tmp_path)
    bad = names(states, "error", "warning", "advice") - {"host-sync"}
    assert states and bad == {*bug.split()}, done.stdout + done.stderr
    assert done.returncode == ("error" in states.values())


@pytest.mark.slow
def test_how_failing_ranks_end(tmp_path):
    text = "import os, time\nint(os.environ['RANK']) and exit(3)\ntime.sleep(60)"
    (tmp_path / "exits.py").write_text(text)
    command = [sys.executable, REPOSITORY / "tools/checkup", "-n2", "exits.py"]
    done = run(command, tmp_path, OMP_NUM_THREADS="1")
    assert done.returncode == 3, done.stderr  # rank 0, which has no partner, has 1
    assert "Traceback" not in done.stderr and "frame #" not in done.stderr
    write_programs(tmp_path, "spawned.py", "loss = loss.detach()", "1 / 0")
    command = [sys.executable, REPOSITORY / "tools/checkup", "spawned.py"]
    done = run(command, tmp_path, OMP_NUM_THREADS="1", PORT=str(free_port()))
    assert done.returncode == 1 and "ZeroDivisionError" in done.stderr, done.stderr
    assert "ProcessExitedException" not in done.stderr
    own = 'os.environ["PORT"] + str(rank)'
    write_programs(tmp_path, "spawned.py", 'os.environ["PORT"]', own)
    done = run(command, tmp_path, OMP_NUM_THREADS="1", PORT="2345")
    assert done.returncode and "Choose the port before mp.spawn()" in done.stderr


def test_one_line_for_what_cannot_be_run(tmp_path):
    (tmp_path / "script.py").write_text("print('bye')")
    for script, line in (
        ("no.py", "error: no script no.py; give a file's path, or -m MODULE"),
        ("script.py", "Error: script.py made no process group; put -n 2 before"),
    ):
        job = Run(tmp_path, "", "tools/checkup/__main__.py", script)
        assert job.join() == [2] and line in job.output()


def test_it_explains_each_check(tmp_path, monkeypatch):
    """--explain, and the table of its README."""
    monkeypatch.syspath_prepend(REPOSITORY / "tools/checkup")
    checks = importlib.import_module("ddp_checkup.checks").CHECKS
    readme = (REPOSITORY / "tools/checkup/README.md").read_text()
    rows = re.findall(
        r"^\| `([\w-]+)` \| (\w+) \| (.*) \| (.*) \| (.*) \|$", readme, re.M
    )
    assert rows == [(c.name, c.level, c.promise, c.seen, c.fix) for c in checks]
    job = Run(tmp_path, "", "tools/checkup/__main__.py", "--explain", "start")
    assert job.join() == [0] and f"Fix: {checks[0].fix}" in job.output()


@pytest.mark.slow
def test_a_stranger_installs_it(tmp_path):
    """The commands of its README, in an environment that has its requirements."""
    folder = shutil.copytree(REPOSITORY / "tools/checkup", tmp_path / "checkup")
    run([sys.executable, "-m", "venv", "--without-pip", "env"], tmp_path)
    (site,) = (tmp_path / "env").glob("lib/python*/site-packages")
    (site / "pytorch.pth").write_text(sysconfig.get_path("purelib"))
    python = tmp_path / "env/bin/python"
    done = run([python, "-m", "pip", "install", "."], folder)
    assert done.returncode == 0, done.stderr
    command = tmp_path / "env/bin/ddp-checkup", "-n", 2, "example.py"
    done = run(command, folder, OMP_NUM_THREADS="1")
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    readme = (folder / "README.md").read_text()
    report = re.search("    Checkup of .*?\n\n", readme, re.DOTALL)[0]
    report = textwrap.dedent(report).strip()
    assert report in done.stdout
    # Its fixture for pytest fails with the report, or with the script's own error.
    example = (folder / "example.py").read_text()
    fixed = example.replace("3):\n", "3):\n        sampler.set_epoch(epoch)\n")
    (tmp_path / "fixed.py").write_text(fixed)
    (tmp_path / "example.py").write_text(example)
    (tmp_path / "fails.py").write_text("raise ValueError('its own error')")
    (tmp_path / "test_it.py").write_text("""
def test_it(checkup):
    checkup("fixed.py")
    checkup("example.py")

def test_that_fails(checkup):
    checkup("fails.py")
""")
    done = run([python, "-m", "pytest", "test_it.py"], tmp_path, OMP_NUM_THREADS="1")
    assert "Failed: error set-epoch" in done.stdout, done.stdout
    assert report in done.stdout, done.stdout
    assert "ValueError: its own error" in done.stdout, done.stdout


@pytest.mark.parametrize(
    "script, status",
    [
        ("cinic_lab/cinic_ddp.py", 0),
        slow("dp_ddp_intro/ddp.py", 0),
        slow("dp_ddp_intro/ddp_unfinished.py", 1),
        slow("exercise8/solutions/strong_scaling.py", 0),
    ],
)
def test_the_command_of_a_lesson_grades_a_script(script, status, sample, tmp_path):
    """The solution passes, and the unchanged copy does not."""
    lesson = script.split("/")[0]
    exercise = copy_exercise(lesson, tmp_path)
    if lesson == "exercise8":  # as many photos as its reader has
        sample = make_data(tmp_path / "data", 1, [lesson])
    commands = [c for _, block in blocks(f"{lesson}/README.md") for c in block]
    (command,) = [c for c in commands if "tools/checkup" in c and "my_" in c]
    shutil.copy(tmp_path / script, exercise / re.search(r"my_\w+\.py", command)[0])
    command = command.replace("sbatch", "bash")
    if lesson == "cinic_lab":  # its sample is a tenth, too
        command += " --batch-size 24"
    done = run(["bash", "-c", command], exercise, sample)
    assert done.returncode == status, done.stdout + done.stderr
    row = "ok" if status == 0 else "error"
    assert lesson == "cinic_lab" or re.search(f"{row} +reference ", done.stdout)
