"""docs/TROUBLESHOOTING.md quotes each message that the code can print, and no other.

A message is compared by its constant parts; whatever is filled in is "...".
"""

import ast
import os
import re
from functools import cache
from pathlib import Path

import pytest
from conftest import REPOSITORY

DOCUMENT = REPOSITORY / "docs/TROUBLESHOOTING.md"
# What a message itself has for the reader to fill in, and the document for "...".
PLACES = re.compile(r"\b(N|FILE|FOLDER|NODE|NAME|ADDRESS|SCRIPT\.py)\b")


def files(ending):
    """Return the repository's files, without tests, data and what is hidden."""
    for top in sorted(REPOSITORY.iterdir()):
        if top.is_dir() and top.name not in ("tests", "data") and top.name[0] != ".":
            for folder, _, names in os.walk(top):  # which follows no links
                for file in sorted(Path(folder, name) for name in names):
                    if file.suffix == ending and not file.is_symlink():
                        yield file


def normal(text):
    text = re.sub(r"^(Error|Wrong|Warning): ?", "", PLACES.sub("...", text).strip())
    return re.sub(r"(\.\.\.)+", "...", " ".join(text.split()))


def constant_parts(node, names):
    """Return the text of an expression; "..." is what is not constant in it.

    names: {variable: the expression that it was given last}
    """
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(constant_parts(part, names) for part in node.values)
    if isinstance(node, ast.FormattedValue):
        return constant_parts(node.value, names)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return "".join(constant_parts(n, names) for n in (node.left, node.right))
    if isinstance(node, ast.Name) and node.id in names:
        others = {name: n for name, n in names.items() if name != node.id}
        return constant_parts(names[node.id], others)
    return "..."


@cache
def assignments(function):
    return [node for node in ast.walk(function) if isinstance(node, ast.Assign)]


def assigned(function, line):
    """Return {variable: expression} of a function, as it is at this line."""
    names = {}
    for node in assignments(function):
        for target in node.targets if node.lineno < line else ():
            if isinstance(target, ast.Name):
                names[target.id] = node.value
    return names


def message(node, names):
    """Return the message that this piece of code prints, or None."""
    if isinstance(node, ast.Assign):  # cli.py makes a line of others' errors
        if ast.unparse(node).startswith("kind, text = (UserError, "):
            return constant_parts(node.value.elts[1], names)
    elif isinstance(node, ast.AugAssign):
        if isinstance(node.value, ast.Constant) and str(node.value.value)[0] == ":":
            return f"...{node.value.value}"
    elif isinstance(node, ast.FunctionDef):  # check.py's line of who did not come
        if node.name == "missing":
            return constant_parts(node.body[-1].value, names)
    elif isinstance(node, ast.Call) and node.args:
        name, text = ast.unparse(node.func), constant_parts(node.args[0], names)
        if name in ("UserError", "self.give_up") or "found['" in name:
            return text
        if name.endswith(".at_most"):  # give_up() says the rest
            return f"{text}, ..."
        if name == "threading.Timer":
            return constant_parts(node.args[2].elts[0], names)
        if name == "say" or (name == "print" and "stderr" in ast.unparse(node)):
            return text
        if name == "sys.exit" and text.startswith("Error: "):
            return text
    return None


def messages_of_python(source):
    """Yield the messages of a script, each with its line."""
    tree = ast.parse(source)
    inside = {}  # {node: the innermost function around it}
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef):
            inside |= {node: function for node in ast.walk(function)}
    for node in ast.walk(tree):
        line = getattr(node, "end_lineno", 0)
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "KNOWN":
            for what in ast.literal_eval(node.value).values():
                yield f"{what} (...)", line
        text = normal(message(node, assigned(inside.get(node, tree), line)) or "")
        if text not in ("", "...", "... (...)"):
            yield text, line


def messages_of_shell(source):
    """Yield what a shell script prints to stderr, each with its line."""
    words = r'((?:"(?:[^"\\]|\\.)*"[ \\\n]*)+)'
    for match in re.finditer(rf"(?:echo|printf) +{words}>&2", source):
        text = " ".join(re.findall(r'"((?:[^"\\]|\\.)*)"', match[1]))
        text = re.sub(r"\$\(\(.*?\)\)|\$\{.*?\}|\$\w+", "...", text)
        text = text.replace("\\n", " ").replace("\\`", "`")
        yield normal(text), source[: match.start()].count("\n") + 1


@cache
def printed():
    """Return {message: where the code prints it}."""
    found = {}
    read = {".py": messages_of_python, ".sh": messages_of_shell}
    for ending, messages in read.items():
        for file in files(ending):
            for text, line in messages(file.read_text()):
                found[text] = f"{file.relative_to(REPOSITORY)}:{line}"
    return found


def quoted_rows(text):
    """Return {row: message} of the tables below "Every message"."""
    part = text.split("\n## Every message\n")[1].split("\n## ")[0]
    rows = re.finditer(r"^\| (`+) ?(.*?) ?\1 \|.*$", part, re.M)
    return {row[0]: normal(row[2]) for row in rows}


def quoted(text):
    return set(quoted_rows(text).values())


def differences(text):
    """Return the messages that this document lacks, and those that it invents."""
    in_code, in_text = printed(), quoted(text)
    missing = {m: where for m, where in in_code.items() if m not in in_text}
    return missing, in_text - in_code.keys()


def test_each_message_is_quoted_and_none_is_invented():
    missing, invented = differences(DOCUMENT.read_text())
    assert not missing and not invented


def test_it_notices_a_row_that_is_missing():
    text = DOCUMENT.read_text()
    rows = quoted_rows(text)
    assert len(rows) == len(quoted(text)), "a message has two rows"
    for row, message in rows.items():
        missing, invented = differences(text.replace(row, "| |"))
        assert list(missing) == [message] and not invented


def test_it_notices_a_row_that_is_invented():
    row, part = "| `no luck in FILE: type it again` | |", "\n## What others say"
    text = DOCUMENT.read_text().replace(part, f"\n{row}\n{part}")
    missing, invented = differences(text)
    assert not missing and invented == {"no luck in ...: type it again"}


@pytest.mark.parametrize(
    "code",
    [
        'raise UserError(f"no {what} in {file}: " "type it")',
        'where = f"in {file}"\nraise UserError(f"no {what} {where}: type it")',
        'sys.exit("Error: no " + luck + " in " + file + ": type it")',
        'print(f"Error: no {what} in {file}: type it", file=sys.stderr)',
    ],
)
def test_it_sees_a_new_message_of_python(code):
    assert [m for m, _ in messages_of_python(code)] == ["no ... in ...: type it"]


def test_it_sees_a_new_message_of_shell():
    code = 'true || { echo "Error: no $what in" \\\n "$PWD: type \\`it\\`" >&2; }'
    assert [m for m, _ in messages_of_shell(code)] == ["no ... in ...: type `it`"]


def test_what_others_say_has_its_source():
    part = DOCUMENT.read_text().split("\n## What others say")[1]
    _, ours, public = part.split("\n\n| ")
    assert "https" not in ours
    rows = public.splitlines()[2:]
    assert rows and all("](https://github.com/" in row for row in rows)
