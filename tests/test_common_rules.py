"""common/ knows no exercise, and each exercise works alone."""

import re

import pytest
from conftest import EXERCISES, REPOSITORY

MODULES = sorted(REPOSITORY.glob("common/[a-z]*.py"))


def test_common_imports_nothing_from_the_exercises():
    others = {f.stem for e in EXERCISES for f in (REPOSITORY / e).rglob("*.py")}
    others -= {file.stem for file in MODULES} | {"__main__"}
    for file in MODULES:
        imports = re.findall(r"^ *(?:import|from) (\w+)", file.read_text(), re.M)
        assert imports and not others & set(imports), file


@pytest.mark.parametrize("exercise", EXERCISES)
def test_each_exercise_works_alone(exercise):
    folder = REPOSITORY / exercise
    assert (folder / "common").readlink().as_posix() == "../common"
    synthetic = exercise in ("dp_ddp_intro", "clinic")  # made by each run
    for name in ("download_data.py", "sample_data.py"):
        assert (folder / name).exists() != synthetic
    for solutions in folder.glob("solutions"):
        assert (solutions / "dataset.py").readlink().as_posix() == "../dataset.py"
    for name in ("README.md", "ANSWERS.md", "ROWS.md", "dataset.py"):
        assert (folder / name).is_file()
