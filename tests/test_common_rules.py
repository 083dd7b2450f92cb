"""Rules of common/: two exercises use each name; each exercise works alone.

A name may be used directly, or through another name of common/ that is.
"""

import ast
import re

import pytest
from conftest import EXERCISES, REPOSITORY

MODULES = sorted(REPOSITORY.glob("common/[a-z]*.py"))


def definitions():
    """Return {name: source} of what common/ defines: functions, classes, constants.

    What a module does when it is imported has the module's own name.
    """
    found = {}
    for file in MODULES:
        text = file.read_text()
        found[file.stem] = ""
        for statement in ast.parse(text).body:
            source = ast.get_source_segment(text, statement)
            defines = re.match(r"(?:def|class) (\w+)|([\w, ]+) = ", source)
            if defines:
                for name in re.split(", *", defines[1] or defines[2]):
                    found[name] = found.get(name, "") + source
            elif not source.startswith('"""'):
                found[file.stem] += source
    return found


def imported(exercise):
    """Return the names of common/ that the files of an exercise import or start."""
    names = set()
    for file in (REPOSITORY / exercise).rglob("*"):
        if file.suffix in (".py", ".ipynb", ".sh", ".md"):
            text = file.read_text()
            pattern = r"from common(?:\.(\w+))? import (\([^)]*\)|[\w, ]*)"
            for module, listed in re.findall(pattern, text):
                names |= {module, *re.findall(r"\w+", listed)}
            names |= set(re.findall(r"-m common\.(\w+)", text))
            if "launch_nodes.sh" in text:
                names.add("torchrun")
    return names


def expand(names, sources):
    """Return these names of common/, and all names that they use in turn."""
    seen, todo = set(), [name for name in names if name in sources]
    while todo:
        name = todo.pop()
        if name not in seen:
            seen.add(name)
            words = re.findall(r"\w+", sources[name])
            todo += [word for word in words if word in sources]
    return seen


def test_each_name_in_common_is_used_by_two_exercises():
    sources = definitions()
    users = {name: set() for name in sources}
    for exercise in EXERCISES:
        for name in expand(imported(exercise), sources):
            users[name].add(exercise)
    assert {"RunLog", "to_metrics", "peak_memory", "run", "torchrun"} <= set(users)
    assert {name: who for name, who in users.items() if len(who) < 2} == {}


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
