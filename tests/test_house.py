"""The rules of the house: who imports what, and what each lesson has."""

import re
import subprocess
from graphlib import TopologicalSorter

import pytest
from conftest import EXERCISES, REPOSITORY, WITH_DATA

LISTED = subprocess.check_output(["git", "ls-files"], cwd=REPOSITORY, text=True)
FILES = [f for f in map(REPOSITORY.joinpath, LISTED.splitlines()) if f.is_file()]
TESTS = [file for file in FILES if "tests" in file.relative_to(REPOSITORY).parts]
PYTHON = [file for file in FILES if file.suffix == ".py" and not file.is_symlink()]
MODULES = [file for file in PYTHON if file not in TESTS]
COPIED = "tools/check.py", "tools/machine.py"  # to other machines
MAY_IMPORT = {  # besides a folder's own modules
    **{folder: [] for folder in ("common", "checkup", *COPIED)},
    "tools/check.py": ["tools/machine.py"],
    **{exercise: ["common"] for exercise in EXERCISES},
    "beyond_ddp": ["common", "dp_ddp_intro"],  # dataset.py is a link
    "tools": ["common", *COPIED],
    "tools/mfu.py": ["common", "tools", *EXERCISES],  # counts FLOPs of their models
    "bench": ["common", "tools", *COPIED, *EXERCISES],
    "docs": ["tools"],
}
IMPORT = r"^ *(?:from|import) (?:(?:common|tools|ddp_checkup)\.)?(\w+)"
TRAINING = "data", "device", "errors", "log", "metrics"  # what its scripts import


def owner(file):
    path = f"{file.relative_to(REPOSITORY)}/"
    return max((key for key in MAY_IMPORT if path.startswith(f"{key}/")), key=len)


def test_nobody_imports_from_above_and_there_is_no_circle():
    graph = {file: [] for file in MODULES}
    for file in MODULES:
        for name in re.findall(IMPORT, file.read_text(), re.M):
            found = [f for f in MODULES if name in (f.stem, f.parent.name)]
            own = [f for f in found if owner(f) == owner(file)]
            used = own or [f for f in found if owner(f) in MAY_IMPORT[owner(file)]]
            assert used or not found, f"{file} imports {name}"
            graph[file] += [f for f in used if f.stem == name]
    TopologicalSorter(graph).prepare()  # raises CycleError


@pytest.mark.parametrize("exercise", EXERCISES)
def test_a_lesson_has_its_files(exercise):
    folder, names = REPOSITORY / exercise, ["README.md", "ANSWERS.md", "ROWS.md"]
    names += ["OUTPUT.md", "dataset.py", "download_data.py", "sample_data.py"]
    for name in names if exercise in WITH_DATA else names[:5]:
        assert (folder / name).is_file(), name
    assert (folder / "common").readlink().as_posix() == "../common"
    for script in folder.rglob("*.py"):
        if "# DDP: " in script.read_text():
            names = re.findall(r"^from common\.(\w+)", script.read_text(), re.M)
            assert {*names} <= {*TRAINING}, script


def test_no_file_names_a_persons_folder():
    pattern = re.compile(rb"/(home|Users|root)/\w")
    assert not [file for file in FILES if pattern.search(file.read_bytes())]
