"""A class: students read the teacher's files, and sbatch gets the site's options."""

import os
import re
import shutil
from pathlib import Path

import pytest
from conftest import REPOSITORY, copy_exercise, make_data, run

GUIDE = (REPOSITORY / "docs/CLUSTER.md").read_text()
TEACHERS = "/projects/course/multigpu"
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "ip")
SBATCH_VARIABLES = ["ACCOUNT", "PARTITION", "RESERVATION"]
SBATCH_VARIABLES += ["MEM_PER_CPU", "MEM_PER_GPU", "MEM_PER_NODE"]
VARIABLES = ["DATADIR", "TORCH_HOME"] + [f"SBATCH_{n}" for n in SBATCH_VARIABLES]
can_start = os.geteuid() == 0 and all(map(shutil.which, PROGRAMS))


@pytest.fixture
def exercise(tmp_path):
    """A student's exercise 8; the teacher's clone is tmp_path/course."""
    exercise = copy_exercise("exercise8", tmp_path)
    (tmp_path / "common").unlink()
    shutil.copytree(REPOSITORY / "common", tmp_path / "common")
    text = (tmp_path / "common/sites/class.sh").read_text()
    text = re.sub("(?m)^# (export )", r"\1", text)
    assert text.count(TEACHERS) == 1 and TEACHERS[:-9] in GUIDE
    text = text.replace(TEACHERS, f"{tmp_path}/course").replace(":-gpu", ":-other")
    (tmp_path / "common/sites/here.sh").write_text(text)
    (tmp_path / "course/data").mkdir(parents=True)
    (tmp_path / "course/.venv").symlink_to(REPOSITORY / ".venv")
    return exercise


def run_in_shell(command, exercise, **env):
    """Return what a command prints in a student's shell on a login node."""
    for name in (*VARIABLES, "VIRTUAL_ENV", "SLURM_CONF"):
        command = command if name in env else f"unset {name}; {command}"
    done = run(["bash", "-c", command], exercise, **{"SITE": "here", **env})
    assert done.returncode == 0, done.stderr
    return done.stdout


def settings(exercise, times=1, **env):
    show = f"for name in {' '.join(VARIABLES)}; do echo $name=${{!name-unset}}; done"
    shown = run_in_shell("source common/env.sh; " * times + show, exercise, **env)
    return dict(line.split("=") for line in shown.splitlines())


def test_a_student_sets_no_variable(exercise, tmp_path):
    found = settings(exercise)
    assert found == settings(exercise, times=2)  # a job has them already
    assert found["DATADIR"] == f"{tmp_path}/course/data"
    assert found["TORCH_HOME"] == f"{tmp_path}/course/data/torch"
    values = [found[name] for name in VARIABLES[2:]]
    assert values == ["project_1234", "other", "monday", "unset", "16G", "unset"]
    unedited = settings(exercise, SITE="class")  # sbatch would refuse its account
    assert unedited["SBATCH_ACCOUNT"] == unedited["SBATCH_PARTITION"] == "unset"
    show = "source common/env.sh; command -v python; echo $VIRTUAL_ENV"
    python = run_in_shell(show, exercise).splitlines()[1]
    assert Path(python).samefile(REPOSITORY / ".venv")


def test_a_students_variables_come_first(exercise):
    own = {name: "own" for name in VARIABLES if "MEM" not in name}
    own |= {"SBATCH_RESERVATION": "", "SBATCH_MEM_PER_NODE": "9G"}
    found = settings(exercise, times=2, **own)
    assert {name: found[name] for name in own} == own
    assert found["SBATCH_MEM_PER_GPU"] == "unset"  # sbatch accepts only one of them


def test_students_can_read_the_teachers_files(tmp_path):
    """After the guide's chmod, even if the teacher's umask is 077."""
    umask = os.umask(0o077)
    try:
        data = make_data(tmp_path / "data", 0.1, ["exercise8"])
    finally:
        os.umask(umask)
    allow = re.search(r"^chmod .*$", GUIDE, re.M)[0]
    assert run(["bash", "-c", allow], tmp_path).returncode == 0
    for path in (data, *data.rglob("*")):
        rights = 0o5 if path.is_dir() else 0o4
        assert path.stat().st_mode & 0o007 == rights, path


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    """A real Slurm with a reservation; return its SLURM_CONF."""
    script = REPOSITORY / "tests/slurm/cluster.sh"
    folder = tmp_path_factory.mktemp("slurm") / "cluster"
    conf = str(folder / "slurm.conf")
    reserve = "scontrol create reservation reservationname=monday users=root "
    reserve += "starttime=now duration=60 nodes=n1"
    try:
        for command in (["bash", script, "up", folder], reserve.split()):
            done = run(command, "/", SLURM_CONF=conf)
            assert done.returncode == 0, done.stderr
        yield conf
    finally:
        run(["bash", script, "down", folder], "/")


def submit(exercise, slurm, command, **env):
    """Submit after `source common/env.sh`; return what scontrol shows of the job."""
    command = f"source common/env.sh; {command}"
    output = run_in_shell(command, exercise, SLURM_CONF=slurm, **env)
    number = re.fullmatch(r"Submitted batch job (\d+)\n", output)[1]
    show = f"scontrol --oneliner show job {number}"
    job = run(show.split(), "/", SLURM_CONF=slurm).stdout
    run(["scancel", number], "/", SLURM_CONF=slurm)
    return dict(re.findall(r"(\w+)=(\S*)", job))


@pytest.mark.cluster
@pytest.mark.skipif(not can_start, reason="no Slurm, or not root")
def test_sbatch_gets_the_options_of_the_site_file(exercise, slurm):
    job = submit(exercise, slurm, "sbatch --hold run.sh x.py")
    assert (job["Account"], job["Partition"]) == ("project_1234", "other")
    assert (job["Reservation"], job["MemPerTres"]) == ("monday", "gres:gpu:16384")
    command = "sbatch --hold --mem=3G --account=mine --partition=gpu run.sh x.py"
    job = submit(exercise, slurm, command, SBATCH_RESERVATION="")
    assert (job["Account"], job["Partition"]) == ("mine", "gpu")
    assert job["MinMemoryNode"] == "3G"  # a student's own options come first
    assert not {"MemPerTres", "Reservation"} & job.keys()
