"""make venv: the PyTorch that it installs from a local package index."""

import json
import os
import shutil
import zipfile

import pytest
from conftest import REPOSITORY, path_without_sbatch, run, serving

pytestmark = pytest.mark.slow


def write_wheel(folder, name, version):
    """Write a wheel that has only a name and a version."""
    folder = folder / name
    folder.mkdir(parents=True)
    info = f"{name}-{version}.dist-info"
    about = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    kind = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    file = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(file, "w") as wheel:
        wheel.writestr(f"{name}.py", f"version = '{version}'\n")
        wheel.writestr(f"{info}/METADATA", about)
        wheel.writestr(f"{info}/WHEEL", kind)
        wheel.writestr(f"{info}/RECORD", "")


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    """Return the addresses of a PyTorch index, and of a PyPI with other versions."""
    folder = tmp_path_factory.mktemp("index")
    for name in ("torch", "torchvision"):
        write_wheel(folder / "cpu", name, "9+cpu")
        write_wheel(folder / "cu126", name, "8+cu126")
        write_wheel(folder / "pypi", name, "9")
    with serving(folder) as address:
        yield address


@pytest.fixture
def make_venv(tmp_path, index):
    """Return a function that runs make venv: (version of PyTorch, output)."""
    checkout, commands = tmp_path / "a clone, à côté", tmp_path / "bin"
    shutil.copytree(REPOSITORY / "common", checkout / "common")
    for file in ("Makefile", "install.sh"):
        shutil.copy(REPOSITORY / file, checkout)
    for file in ("cinic_lab/requirements.txt", "docs/pages/requirements.txt"):
        (checkout / file).parent.mkdir(parents=True)
        (checkout / file).touch()
    (checkout / "requirements.txt").write_text("torch\ntorchvision\n")
    around = {"PATH": path_without_sbatch(commands), "PIP_CONFIG_FILE": os.devnull}
    around |= {"PIP_FIND_LINKS": "", "PIP_EXTRA_INDEX_URL": ""}
    around |= {"TORCH_INDEX": index, "PIP_INDEX_URL": f"{index}/pypi"}

    def make(site="", **env):
        (checkout / "common/sites/venv.sh").write_text(site)
        done = run(["make", "venv"], checkout, **around | env)
        assert done.returncode == 0, done.stdout + done.stderr
        show = [
            checkout / ".venv/bin/python",
            "-c",
            "import torch as t; print(t.version)",
        ]
        return run(show, tmp_path).stdout.strip(), done.stdout

    make.checkout, make.commands = checkout, commands
    return make


def test_cpu_wheels_without_a_gpu_and_slurm(make_venv):
    version, output = make_venv()
    assert version == "9+cpu" and "PyTorch for CPUs" in output
    # Nothing is installed again, but for another PyTorch.
    version, output = make_venv(TORCH_INDEX="http://localhost:9")
    assert version == "9+cpu" and "Nothing to be done" in output
    assert make_venv(TORCH="cu126")[0] == "8+cu126"
    (make_venv.checkout / "requirements.txt").touch()
    assert make_venv()[0] == "8+cu126"


def test_other_wheels_with_a_gpu(make_venv):
    assert make_venv("has_driver() { true; }")[0] == "9"


@pytest.mark.parametrize("site, version", [("", "9"), ("TORCH=cu126", "8+cu126")])
def test_other_wheels_with_slurm(site, version, make_venv):
    (make_venv.commands / "sbatch").symlink_to("/bin/true")
    assert make_venv(site)[0] == version


def test_a_site_that_needs_an_account(make_venv):
    """Its file ends without one, which make venv does not need."""
    assert make_venv(SLURM_CLUSTER_NAME="lumi", SBATCH_ACCOUNT="")[0] == "9+cpu"


def test_the_command_of_the_container_is_in_the_makefile():
    file = REPOSITORY / ".devcontainer/devcontainer.json"
    typed = json.loads(file.read_text())["postCreateCommand"]
    done = run(["bash", "-c", f"{typed} --dry-run"], REPOSITORY)
    assert done.returncode == 0 and typed == "TORCH=cpu make venv", done.stderr
