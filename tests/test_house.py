"""The rule of the house: a name is in common/ if at least two exercises use it.

Directly, or through another name of common/. What one exercise uses lives in its
folder, and common/ imports nothing from there.
"""

import ast
import importlib
import json
import re
from functools import cache

import pytest
from conftest import EXERCISES, REPOSITORY

MODULES = {f"common.{f.stem}": f for f in REPOSITORY.glob("common/[a-z]*.py")}


@cache
def parse(file):
    if file.suffix == ".ipynb":
        cells = json.loads(file.read_text())["cells"]
        code = ["".join(c["source"]) for c in cells if c["cell_type"] == "code"]
        return ast.parse("\n".join(code))
    return ast.parse(file.read_text())


def imported(tree):
    """Return {name here: name there} of all that a file imports from common/."""
    names = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module in MODULES:
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                names[alias.asname or alias.name] = name
        elif isinstance(node, ast.Import | ast.ImportFrom):
            prefix = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            for alias in node.names:  # as a module: all that is run by its import
                if prefix + alias.name in MODULES:
                    names[alias.asname or alias.name] = prefix + alias.name
    return names


def defined(statement):
    """Return the names that a statement of a module defines."""
    if isinstance(statement, ast.FunctionDef | ast.ClassDef):
        return [statement.name]
    targets = getattr(statement, "targets", [getattr(statement, "target", None)])
    stored = [node for t in targets if t for node in ast.walk(t)]
    return [
        node.id
        for node in stored
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    ]


def graph():
    """Return {name: names that it uses}; a module's is what runs at its import."""
    uses = {}
    for module, file in MODULES.items():
        body, here = parse(file).body, imported(parse(file))
        own = {name: f"{module}.{name}" for s in body for name in defined(s)}
        uses[module] = {name.rpartition(".")[0] for name in here.values()} - {
            "common"
        }
        for statement in body:
            names = {n.id for n in ast.walk(statement) if isinstance(n, ast.Name)}
            used = {(own | here)[name] for name in names if name in own | here}
            for user in defined(statement) or [""]:
                name = f"{module}.{user}".rstrip(".")
                uses[name] = uses.get(name, set()) | used
    return uses


def files_of(exercise, *suffixes):
    files = (REPOSITORY / exercise).rglob("*")
    return [f for f in files if f.suffix in suffixes and "logs" not in f.parts]


def entries(exercise):
    """Return the names of common/ that the files of an exercise name themselves."""
    names = set()
    for file in files_of(exercise, ".py", ".ipynb"):
        names |= set(imported(parse(file)).values())
    for file in files_of(exercise, ".md", ".sh"):
        found = re.findall(
            r"-m (common\.\w+)|source common/(\w+).sh", file.read_text()
        )
        names |= {module for module, _ in found if module in MODULES}
        if ("", "nodes") in found:
            names.add("common.torchrun")
    return names | {name.rpartition(".")[0] for name in names}


def reached(names, uses):
    seen, todo = set(), [name for name in names if name in uses]
    while todo:
        name = todo.pop()
        if name not in seen:
            seen.add(name)
            todo += [other for other in uses[name] if other in uses]
    return seen


def users():
    """Return {name of common/: the exercises that use it}."""
    uses, found = graph(), {}
    for exercise in EXERCISES:
        for name in reached(entries(exercise), uses):
            found.setdefault(name, set()).add(exercise)
    return {name: found.get(name, set()) for name in uses}


def test_a_name_in_common_is_used_by_two_exercises():
    alone = {name: who for name, who in users().items() if len(who) < 2}
    assert alone == {}


def test_so_is_a_method_of_a_class_in_common():
    texts = {
        e: [f.read_text() for f in files_of(e, ".py", ".ipynb")] for e in EXERCISES
    }
    common = [file.read_text() for file in MODULES.values()]
    for module in set(MODULES) - {"common.torchrun"}:  # importing that runs a job
        for kind in vars(importlib.import_module(module)).values():
            if not isinstance(kind, type) or kind.__module__ != module:
                continue
            for name in {n for n in vars(kind) if n[0] != "_"} - set(
                dir(kind.__base__)
            ):
                who = [e for e, here in texts.items() if is_called(name, here)]
                assert len(who) > 1 or is_called(name, common), (module, name, who)


def is_called(name, texts):
    return any(re.search(rf"\.{name}\(", text) for text in texts)


def test_the_rule_is_held_by_these_tests():
    """Names that two exercises use, one uses, and that are used through others."""
    found = users()
    assert found["common.checkpoint.can_write"] == {"mnist_multigpu", "cinic_lab"}
    assert found["common.data.pixel_values"] > {"exercise8"}  # by normalise()
    assert found["common.cli.report"] == set(EXERCISES)  # by importing cli
    assert found["common.torchrun.roll_call"] == set(EXERCISES)  # run scripts do
    drawers = {"exercise8", "cifar100_demo", "cinic_lab"}
    assert found["common.drawing.background"] == drawers
    assert found["common.drawing.draw_data_set"] == {*drawers, "mnist_multigpu"}
    uses = {"one": {"two"}, "two": set(), "three": set()}
    assert reached({"one"}, uses) == {"one", "two"}


def test_common_imports_nothing_from_the_rooms():
    rooms = {f.stem for e in EXERCISES for f in (REPOSITORY / e).rglob("*.py")}
    rooms -= {file.stem for file in MODULES.values()}
    for file in MODULES.values():
        for node in ast.walk(parse(file)):
            if isinstance(node, ast.Import):
                assert not {alias.name for alias in node.names} & rooms, file
            elif isinstance(node, ast.ImportFrom):
                assert node.module not in rooms, file


def lines(modules):
    return sum(len(MODULES[module].read_text().splitlines()) for module in modules)


@pytest.mark.parametrize("exercise", EXERCISES)
def test_a_room_can_be_lived_in_alone(exercise):
    room = REPOSITORY / exercise
    assert (room / "common").readlink().as_posix() == "../common"
    for name in ("README.md", "dataset.py"):
        assert (room / name).is_file()
    drawn = exercise in ("dp_ddp_intro", "clinic")  # the data, by each run
    for name in ("download_data.py", "sample_data.py"):
        assert (room / name).exists() != drawn
    for folder in room.glob("solutions"):
        assert (folder / "dataset.py").readlink().as_posix() == "../dataset.py"
