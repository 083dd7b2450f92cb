"""Which settings env.sh takes, and what the examples set."""

import os
import shutil
import sys
from pathlib import Path

import pytest
from conftest import REPOSITORY, run

SITES = sorted(path.stem for path in (REPOSITORY / "common/sites").glob("*.sh"))
# What a cluster has, and what here only says that it ran.
STUBS = """
module() { echo "module $*" >&2; }
conda() { [[ $1 == shell.bash ]] || echo "conda $*" >&2; }
singularity() { shift 2; WITH_CONDA=: "$@"; }
set -euo pipefail
"""


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
        ("conda", "conda activate multigpu-tensorflow"),
        ("lumi", "lumi-tensorflow-rocm"),
        ("venv", "make venv-tensorflow"),
    ],
)
def test_tensorflow_has_an_environment_of_its_own(site, sign, tmp_path):
    shutil.copytree(REPOSITORY / "common/sites", tmp_path / "common/sites")
    shutil.copy(REPOSITORY / "common/env.sh", tmp_path / "common")
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
