"""The checkup's own command line: an everyday mistake is one line."""

import sys

import pytest
from conftest import REPOSITORY, run

CHECKUP = [sys.executable, REPOSITORY / "tools/checkup"]
READS_RANK = "import os\nprint('starts')\nrank = int(os.environ['RANK'])\n"
# One write a line, which no other rank interrupts.
PRINTS = (
    "import os\nos.write(1, f'runs as {os.environ[\"RANK\"]} of 2\\n'.encode())\n"
)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "train.py").write_text(READS_RANK)
    (tmp_path / "prints.py").write_text(PRINTS)
    (tmp_path / "space").mkdir()
    (tmp_path / "space/module.py").write_text(PRINTS)
    return tmp_path


@pytest.mark.parametrize(
    "words, env, line",
    [
        ([], {}, "name a script, or -m MODULE"),
        (["none.py"], {}, "no script none.py; give a file's path"),
        (["-n", "-1", "train.py"], {}, "-n -1: use 2 or more"),
        (["--reference", "one.py 'x", "train.py"], {}, "--reference: No closing"),
        (["--json", "none/x.json", "train.py"], {}, "--json: [Errno 2] No such"),
        (["train.py"], {"RANK": "0"}, "add -n 2, or run `unset RANK`"),
        (["train.py"], {}, "train.py reads 'RANK', which torchrun sets; add -n 2"),
    ],
)
def test_a_mistake_is_one_line(words, env, line, folder):
    done = run([*CHECKUP, *words], folder, **env)
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    assert line in done.stderr.splitlines()[-1]


@pytest.mark.parametrize("script", [["prints.py"], ["-m", "space.module"]])
def test_a_rank_left_over_does_not_matter_with_a_number(script, folder):
    """Also of a package without __init__.py."""
    done = run([*CHECKUP, "-n", "2", *script], folder, RANK="1")
    assert "runs as 0 of 2" in done.stdout and "runs as 1 of 2" in done.stdout
    assert "Traceback" not in done.stderr, done.stderr


def test_results_of_a_watched_run_are_marked(folder):
    text = "import os\nprint(os.environ['DDP_CHECKUP'])\n"
    (folder / "mark.py").write_text(text)
    done = run([*CHECKUP, "-n", "2", "mark.py"], folder)
    assert done.stdout.splitlines().count("1") == 2, done.stdout + done.stderr


def test_no_report_of_an_earlier_run_stays(folder):
    (folder / "rows.json").write_text("{}")
    (folder / "fails.py").write_text("raise ValueError('its own error')")
    done = run([*CHECKUP, "-n", "2", "--json", "rows.json", "fails.py"], folder)
    assert done.returncode == 1 and "its own error" in done.stderr
    assert (folder / "rows.json").read_text() == ""
