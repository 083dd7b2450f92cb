"""Which settings env.sh takes, and what the examples set."""

import os
import re
import shutil
import sys
from pathlib import Path

import pytest
from conftest import EXERCISES, REPOSITORY, copy_room, run

SITES = sorted(path.stem for path in (REPOSITORY / "common/sites").glob("*.sh"))
# What a cluster has, and what here only says that it ran.
STUBS = """
module() { echo "module $*" >&2; }
conda() { [[ $1 == shell.bash ]] || echo "conda $*" >&2; }
singularity() { shift 2; WITH_CONDA=: "$@"; }
set -euo pipefail
"""
PACKAGES = ("torch", "torchvision", "tensorboard", "tqdm", "matplotlib")
OUTSIDE = {"VIRTUAL_ENV": "", "CONDA_PREFIX": ""}
HOW = "on a login node, or see docs/CLUSTER.md#a-package-is-missing\n"


def copy_common(folder):
    shutil.copytree(REPOSITORY / "common/sites", folder / "common/sites")
    shutil.copy(REPOSITORY / "common/env.sh", folder / "common")


def install(folder, *packages):
    """As far as env.sh looks."""
    for package in packages:
        (folder / package).mkdir(parents=True)
        (folder / package / "__init__.py").touch()


def give(folder, *packages):
    """A copy of common/, and in it the site "few": its Python has these alone."""
    copy_common(folder)
    install(folder / "packages", *packages)
    site = f"PYTHON=({sys.executable} -S)\nexport PYTHONPATH={folder}/packages\n"
    (folder / "common/sites/few.sh").write_text(site)


def source(folder, room, show="", **variables):
    bash = f"source {folder}/common/env.sh; {show}"
    return run(["bash", "-c", bash], room, **OUTSIDE | variables)


def virtual_environment(folder, name):
    """Make it, over a Python without packages, and put line_profiler there."""
    make = [f"{sys.base_prefix}/bin/python3", "-m", "venv", "--without-pip"]
    done = run([*make, "--system-site-packages", name], folder)
    assert done.returncode == 0, done.stderr
    (site_packages,) = (folder / name).glob("lib/python*/site-packages")
    install(site_packages, "line_profiler")


def env(tmp_path, show, **variables):
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    base = {
        "PATH": path,
        "SIF": "image.sif",
        "SBATCH_ACCOUNT": "project_1",
        "USER": "me",
    }
    bash = f"{STUBS}\nsource {REPOSITORY}/common/env.sh\n{show}"
    return run(["bash", "-c", bash], tmp_path, **base | variables)


@pytest.mark.parametrize("site", SITES)
def test_each_site_gives_a_python(site, tmp_path):
    show = '"${PYTHON[@]}" -c "import sys; print(sys.argv)" "a b"'
    done = env(tmp_path, show, SITE=site)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "['-c', 'a b']\n"


def test_the_examples_set_what_their_cluster_needs(tmp_path):
    lumi = env(tmp_path, "env", SLURM_CLUSTER_NAME="lumi", DATADIR="")
    assert "MIOPEN_USER_DB_PATH=/tmp/me-miopen" in lumi.stdout
    assert "DATADIR=/scratch/project_1/me/data" in lumi.stdout
    assert "module load singularity-AI-bindings" in lumi.stderr
    assert "module load PyTorch" in env(tmp_path, "", SITE="alvis").stderr
    assert "conda activate multigpu" in env(tmp_path, "", SITE="conda").stderr


@pytest.mark.parametrize(
    "site, sign",
    [
        ("alvis", "module load TensorFlow"),
        ("class", "see common/sites/class.sh"),
        ("conda", "conda activate multigpu-tensorflow"),
        ("lumi", "lumi-tensorflow-rocm"),
        ("venv", "make venv-tensorflow"),
    ],
)
def test_tensorflow_has_an_environment_of_its_own(site, sign, tmp_path):
    copy_common(tmp_path)
    (tmp_path / "tensorflow").mkdir()  # a folder is not the package
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    more = {"PATH": path, "SITE": site, "SBATCH_ACCOUNT": "project_1", "USER": "me"}
    bash = f"{STUBS}\nset +e; ls() {{ echo $* >&2; }}\n"
    bash += "FRAMEWORK=tensorflow; source common/env.sh"
    done = run(["bash", "-c", bash], tmp_path, **more)
    assert sign in done.stderr and "no TensorFlow for" in done.stderr, site


def test_an_unknown_cluster_and_no_cluster_take_the_virtual_environment(tmp_path):
    for variables in ({}, {"SLURM_CLUSTER_NAME": "nobody-knows"}):
        done = env(tmp_path, "command -v python; echo $OMP_NUM_THREADS", **variables)
        assert done.stdout == f"{REPOSITORY}/.venv/bin/python\n1\n", done.stderr


def test_sourcing_it_wrongly_does_not_end_a_login_shell(tmp_path):
    bash = f"SITE=nowhere; source {REPOSITORY}/common/env.sh; echo status $?"
    done = run(["bash", "-c", bash], tmp_path)
    assert done.stdout == "status 2\n"
    assert done.stderr.endswith(f"set SITE to one of {' '.join(SITES)}\n")


def test_a_login_node_knows_the_name_of_its_cluster(tmp_path):
    conf = tmp_path / "slurm.conf"
    conf.write_text(
        "# ClusterName=lumi\nclustername = Alvis # ours\nSlurmctldHost=head\n"
    )
    assert "module load PyTorch" in env(tmp_path, "", SLURM_CONF=str(conf)).stderr
    job = {"SLURM_CONF": str(conf), "SLURM_CLUSTER_NAME": "lumi"}
    assert "singularity-AI-bindings" in env(tmp_path, "", **job).stderr


@pytest.mark.parametrize("site", ["alvis", "lumi"])
def test_a_project_that_is_not_named(site, tmp_path):
    done = env(tmp_path, "", SITE=site, SBATCH_ACCOUNT="", DATADIR="")
    assert done.returncode == 2 and "`export SBATCH_ACCOUNT=" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    no_name = {"SBATCH_ACCOUNT": "", "DATADIR": "", "SLURM_JOB_ID": "1"}
    done = env(tmp_path, "", SITE=site, **no_name)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
    of_job = no_name | {"SLURM_JOB_ACCOUNT": "project_2"}
    assert "project_2/" in env(tmp_path, "echo $DATADIR", SITE=site, **of_job).stdout
    login = f"{STUBS}\nset +eu; source {REPOSITORY}/common/env.sh; "
    login += "echo $? ${DATADIR:-unset}"
    for shell in (["--norc", "-i"], []):  # a login shell goes on, and has no DATADIR
        command = ["bash", *shell, "-c", login]
        done = run(command, tmp_path, SITE=site, SBATCH_ACCOUNT="")
        assert done.stdout == "2 unset\n" and "which project?" in done.stderr
    own = env(
        tmp_path, "echo $DATADIR", SITE=site, SBATCH_ACCOUNT="", DATADIR="/mine"
    )
    assert own.stdout == "/mine\n"


def test_python_must_be_an_array(tmp_path):
    give(tmp_path, *PACKAGES)
    (tmp_path / "common/sites/few.sh").write_text('PYTHON="python -S"\n')
    done = source(tmp_path, tmp_path, "echo $?", SITE="few")
    line = "PYTHON is one word in common/sites/few.sh: write PYTHON=(python -S)"
    assert (done.stderr, done.stdout) == (f"Error: {line}\n", "2\n")


@pytest.mark.parametrize(
    "exercise, script, missing",
    [
        ("exercise8", "run.sh", ["matplotlib"]),
        ("exercise8", "run-2nodes.sh", ["torchvision", "tensorboard", "tqdm"]),
        ("mnist_multigpu", "slurm_ddp.sh", ["line_profiler"]),
    ],
)
def test_a_job_says_in_one_line_what_is_missing(exercise, script, missing, tmp_path):
    room = copy_room(exercise, tmp_path)
    (tmp_path / "common").unlink()
    give(tmp_path, *(name for name in PACKAGES if name not in missing))
    done = run(["bash", script, "x.py"], room, SITE="few", **OUTSIDE)
    add = f"python -m pip install --user {' '.join(missing)}"
    assert done.stderr == (
        f"Error: no {', '.join(missing)} for SITE=few: type `{add}` {HOW}"
    )
    assert done.returncode == 2 and done.stdout == ""
    assert not (room / "logs").exists()


def test_a_job_draws_nothing(tmp_path):
    give(tmp_path, *PACKAGES[:-1])
    assert "no matplotlib" in source(tmp_path, tmp_path, SITE="few").stderr
    assert source(tmp_path, tmp_path, SITE="few", SLURM_JOB_ID="1").stderr == ""


def test_only_the_room_that_profiles_lines_needs_line_profiler(tmp_path):
    give(tmp_path, *PACKAGES)
    for exercise in EXERCISES:
        done = source(tmp_path, REPOSITORY / exercise, SITE="few")
        words = "Error: no line_profiler for" if exercise == "mnist_multigpu" else ""
        assert done.stderr.startswith(words) and bool(done.stderr) == bool(words)


def test_without_pytorch_the_rest_is_not_named(tmp_path):
    give(tmp_path, "torchvision")
    done = source(tmp_path, tmp_path, SITE="few")
    how = "see common/sites/few.sh, or type `export SITE=venv`"
    assert done.stderr == f"Error: no PyTorch for {sys.executable} -S: {how}\n"
    assert "matplotlib" not in done.stderr


def test_tensorflow_needs_no_other_package(tmp_path):
    give(tmp_path, "tensorflow")
    done = source(tmp_path, tmp_path, SITE="few", FRAMEWORK="tensorflow")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_in_an_environment_of_ones_own_pip_needs_no_user(tmp_path):
    give(tmp_path, *PACKAGES[:-1])
    done = source(tmp_path, tmp_path, SITE="few", VIRTUAL_ENV="mine")
    assert "-m pip install matplotlib`" in done.stderr


def test_an_old_virtual_environment_is_made_anew(tmp_path):
    give(tmp_path, *PACKAGES)
    virtual_environment(tmp_path, ".venv")
    more = {"SITE": "venv", "PYTHONPATH": str(tmp_path / "packages")}
    assert source(tmp_path, tmp_path, **more).stderr == ""
    shutil.rmtree(tmp_path / "packages/tqdm")
    done = source(tmp_path, tmp_path, **more)
    line = f"Error: no tqdm for python: type `make venv` in {tmp_path}\n"
    assert done.stderr == line


def test_a_missing_package_leaves_a_shell_with_its_python(tmp_path):
    give(tmp_path, "torch")
    bash = "source common/env.sh; echo status $?; "
    bash += 'python -c "import sys; print(sys.flags.no_site)"'
    done = run(["bash", "--norc", "-i", "-c", bash], tmp_path, SITE="few", **OUTSIDE)
    assert done.stdout == "status 2\n1\n"
    assert "Error: no torchvision, tensorboard, tqdm, matplotlib for" in done.stderr


@pytest.mark.parametrize("site", ["alvis", "lumi"])
def test_a_virtual_environment_adds_to_modules_and_containers(site, tmp_path):
    give(tmp_path, *PACKAGES)
    virtual_environment(tmp_path, f".venv-{site}")
    (tmp_path / "mnist_singlegpu.py").touch()
    # As both do: what they have is found by PYTHONPATH.
    stubs = STUBS.replace('echo "module $*" >&2', "export PYTHONPATH=$PWD/packages")
    show = """"${PYTHON[@]}" -c 'import line_profiler, sys; print(sys.prefix)'"""
    path = f"{sys.base_prefix}/bin:{os.environ['PATH']}"
    more = OUTSIDE | {"PATH": path, "SIF": "image.sif", "USER": "me"}
    bash = f"{stubs}\nsource common/env.sh\n{show}"
    done = run(["bash", "-c", bash], tmp_path, tmp_path, SITE=site, **more)
    assert done.returncode == 0, done.stderr
    assert os.path.samefile(done.stdout.strip(), tmp_path / f".venv-{site}")


@pytest.mark.parametrize("site", ["alvis", "conda", "lumi"])
def test_the_lines_for_a_class_are_whole(site, tmp_path):
    """Without their #, they set what nobody types, and what is typed comes first."""
    copy_common(tmp_path)
    file = tmp_path / f"common/sites/{site}.sh"
    comment = "(?m)^# (export (SBATCH|TORCH)_)"
    text, found = re.subn(comment, r"\1", file.read_text())
    file.write_text(text)
    assert found >= 3 and "export SBATCH_RESERVATION" in text
    show = "env | grep -c '^SBATCH\\|^TORCH_HOME'; echo $SBATCH_RESERVATION $DATADIR"
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    bash = f"{STUBS}\nunset TORCH_HOME SBATCH_ACCOUNT; source common/env.sh; {show}"
    for reservation in ("mine", "NAME"):
        more = {"SBATCH_RESERVATION": reservation} if reservation == "mine" else {}
        more |= {"SITE": site, "PATH": path, "SIF": "image.sif", "USER": "me"}
        done = run(["bash", "-c", bash], tmp_path, **more)
        assert done.returncode == 0, done.stderr
        count, values = done.stdout.splitlines()
        assert int(count) == found and values.startswith(f"{reservation} /")


def test_lumis_newer_containers_are_taken_where_they_are(tmp_path):
    give(tmp_path, "torch")
    lumi = tmp_path / "common/sites/lumi.sh"
    lumi.write_text(lumi.read_text().replace("/appl/local", str(tmp_path)))
    (tmp_path / "laifs/containers").mkdir(parents=True)
    (tmp_path / "sif-images").mkdir()
    more = {"SITE": "lumi", "SBATCH_ACCOUNT": "project_1", "USER": "me", "SIF": ""}
    for framework, image in (
        ("torch", f"{tmp_path}/laifs/containers/lumi-multitorch-latest.sif"),
        ("tensorflow", "lumi-tensorflow-rocm-2.sif"),
    ):
        bash = f"{STUBS}\nset +e; ls() {{ echo lumi-tensorflow-rocm-2.sif; }}\n"
        bash += 'source common/env.sh; echo "${PYTHON[2]}"'
        done = run(["bash", "-c", bash], tmp_path, FRAMEWORK=framework, **more)
        assert done.stdout == f"{image}\n", done.stderr
        module = "lumi-aif" if framework == "torch" else "singularity-AI"
        assert f"module load {module}" in done.stderr
