"""make venv: which PyTorch it installs, from an index on this machine."""

import os
import shutil
import subprocess
import zipfile

import pytest
from conftest import REPOSITORY, run, serving

pytestmark = pytest.mark.slow


def write_wheel(folder, name, version):
    folder = folder / name
    folder.mkdir(parents=True)
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(
        folder / f"{name}-{version}-py3-none-any.whl", "w"
    ) as wheel:
        wheel.writestr(f"{name}.py", f"version = '{version}'\n")
        about = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        wheel.writestr(f"{info}/METADATA", about)
        tag = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        wheel.writestr(f"{info}/WHEEL", tag)
        wheel.writestr(f"{info}/RECORD", "")


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    """The address of PyTorch's index, and of PyPI's, which has other versions."""
    folder = tmp_path_factory.mktemp("index")
    for name in ("torch", "torchvision"):
        write_wheel(folder / "cpu", name, "9+cpu")
        write_wheel(folder / "cu126", name, "8+cu126")
        write_wheel(folder / "pypi", name, "9")
    with serving(folder) as address:
        yield address


@pytest.fixture
def checkout(tmp_path):
    """A checkout that wants PyTorch alone, in a folder that is hard to quote."""
    folder = tmp_path / "a clone, à côté"
    folder.mkdir()
    for name in ("Makefile", "install.sh"):
        shutil.copy(REPOSITORY / name, folder)
    shutil.copytree(REPOSITORY / "common", folder / "common")
    for name in ("cinic_lab", "docs/pages"):
        (folder / name).mkdir(parents=True)
        (folder / name / "requirements.txt").touch()
    (folder / "requirements.txt").write_text("torch\ntorchvision\n")
    return folder


@pytest.fixture
def no_slurm(tmp_path):
    """A PATH without Slurm's commands."""
    (tmp_path / "bin").mkdir()
    for folder in os.environ["PATH"].split(os.pathsep):
        for name in os.listdir(folder) if os.path.isdir(folder) else []:
            link = tmp_path / "bin" / name
            if name != "sbatch" and not os.path.lexists(link):
                link.symlink_to(os.path.join(folder, name))
    return str(tmp_path / "bin")


def make_venv(checkout, index, path, **env):
    """Return the version of PyTorch that make venv installed, and what it said."""
    env = {"PATH": path, "TORCH_INDEX": index, "PIP_FIND_LINKS": "", **env}
    env = {"PIP_CONFIG_FILE": os.devnull, "PIP_EXTRA_INDEX_URL": "", **env}
    env.setdefault("PIP_INDEX_URL", f"{index}/pypi")
    done = run(["make", "venv"], checkout, **env)
    assert done.returncode == 0, done.stdout + done.stderr
    show = "import torch; print(torch.version)"
    command = [checkout / ".venv/bin/python", "-c", show]
    return subprocess.check_output(command, text=True).strip(), done.stdout


def test_no_gpu_and_no_slurm(checkout, index, no_slurm):
    version, said = make_venv(checkout, index, no_slurm)
    assert version == "9+cpu" and "PyTorch for CPUs alone" in said
    # Nothing is installed again, but for another PyTorch.
    version, said = make_venv(checkout, "http://localhost:9", no_slurm)
    assert version == "9+cpu" and "Nothing to be done" in said
    version, _ = make_venv(checkout, index, no_slurm, TORCH="cu126")
    assert version == "8+cu126"
    (checkout / "requirements.txt").touch()
    version, said = make_venv(checkout, index, no_slurm)
    assert version == "8+cu126"


def test_an_index_that_does_not_answer(checkout, index, no_slurm):
    nobody, pypi = "http://localhost:9", f"{index}/pypi"
    version, said = make_venv(checkout, nobody, no_slurm, PIP_INDEX_URL=pypi)
    assert version == "9" and "CPUs" not in said


def test_a_site_with_slurm(checkout, index, no_slurm, tmp_path):
    (tmp_path / "bin/sbatch").symlink_to("/bin/true")
    assert make_venv(checkout, index, no_slurm)[0] == "9"
    with (checkout / "common/sites/venv.sh").open("a") as site:
        site.write("export TORCH=cu126\n")
    (checkout / "requirements.txt").touch()
    assert make_venv(checkout, index, no_slurm)[0] == "8+cu126"


def test_a_gpu(checkout, index, no_slurm):
    """Its driver is there, so PyPI's are installed."""
    text = (checkout / "common/env.sh").read_text()
    head, _, rest = text.partition("has_driver() {")
    fake = "has_driver() { true; }\nno_driver() {"
    (checkout / "common/env.sh").write_text(head + fake + rest)
    assert make_venv(checkout, index, no_slurm)[0] == "9"
