"""--help says what each option means, and what it is if it is not given."""

import ast
import importlib
import signal
import sys

import pytest
from conftest import EXERCISES, REPOSITORY, load, loaded

from common.cli import OptionParser

FOLDERS = [*EXERCISES, *(f"{e}/solutions" for e in EXERCISES), "bench", "common"]
FOLDERS += ["dp_ddp_intro/beyond_ddp", "dp_ddp_intro/tensorflow"]
FILES = [f for folder in FOLDERS for f in sorted((REPOSITORY / folder).glob("*.py"))]
DATA = "download_data.py", "sample_data.py"  # they share their parsers
SCRIPTS = [
    f for f in FILES if f.name in DATA or "OptionParser(__doc__)" in f.read_text()
]
HERE = [REPOSITORY / folder for folder in (*loaded, "bench", "common")]
HERE = [f for f in SCRIPTS if f.parent in HERE]


def name_of(script):
    return str(script.relative_to(REPOSITORY))


@pytest.mark.parametrize("script", HERE, ids=name_of)
def test_each_option_has_a_meaning_and_a_default(script, monkeypatch):
    class Asked(Exception):
        pass

    def parse_args(parser):
        raise Asked(parser)

    room = str(script.parent.relative_to(REPOSITORY))
    if room in loaded:
        module = load(room, script.stem)
    else:
        monkeypatch.syspath_prepend(script.parent)
        prefix = "common." if room == "common" else ""
        module = importlib.import_module(prefix + script.stem)
    monkeypatch.setattr(sys, "argv", [str(script)])
    monkeypatch.setattr(OptionParser, "parse_args", parse_args)
    with pytest.raises(Asked) as asked:
        module.main()
    (parser,) = asked.value.args
    # Else a process that only calls main() would be ended by the next broken pipe.
    assert signal.getsignal(signal.SIGPIPE) is signal.SIG_IGN
    text = parser.format_help()
    assert text == parser.format_help()  # and says so once
    for action in parser._actions[1:]:  # the first one is --help itself
        assert action.help, action.dest
        assert action.required or action.help.count("default:") == 1, action.dest
    assert "None" not in text and module.__doc__.splitlines()[0] in text


@pytest.mark.parametrize("script", sorted(set(SCRIPTS) - set(HERE)), ids=name_of)
def test_so_it_is_where_a_script_cannot_be_imported_here(script):
    calls = [n for n in ast.walk(ast.parse(script.read_text())) if is_option(n)]
    assert calls
    for call in calls:
        given = {keyword.arg for keyword in call.keywords}
        assert "help" in given, ast.unparse(call)
        assert given & {"default", "action"}, ast.unparse(call)


def is_option(node):
    names = "add", "parser.add_argument"
    return isinstance(node, ast.Call) and ast.unparse(node.func) in names
