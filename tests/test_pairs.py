"""The rule of the pair, for every pair in the one list."""

import re
import subprocess

import pytest
from conftest import REPOSITORY

from pairs import PAIRS

SCRIPTS = sorted({script for pair in PAIRS for script in pair[:2]})
TEXTS = {script: (REPOSITORY / script).read_text() for script in SCRIPTS}
each_pair = pytest.mark.parametrize(
    "left, right, tag, most", [pair[:4] for pair in PAIRS], ids=str
)


def diff(*words):
    command = ["diff", *words]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode < 2, done.stderr
    return done.stdout


def count_rows(left, right, *options):
    options = "-W", "180", "-y", "--suppress-common-lines", *options
    return len(diff(*options, left, right).splitlines())


@each_pair
def test_few_rows_differ_and_none_by_its_indent_alone(left, right, tag, most):
    rows = count_rows(left, right)
    assert 0 < rows <= most
    assert rows == count_rows(left, right, "-w", "-B"), "re-indented"


@each_pair
def test_every_hunk_explains_itself(left, right, tag, most):
    for hunk in re.split(r"^@@.*\n", diff("-U0", left, right), flags=re.M)[1:]:
        new = re.findall(r"^\+(.*)", hunk, re.M)
        if new and not new[0].startswith('"""'):  # the script's own first line
            assert any(f"# {tag}: " in row for row in new), hunk


def test_the_same_line_has_the_same_comment_in_all_scripts():
    reasons = {}
    for text in TEXTS.values():
        commented = re.findall(r"^ *(\S.*)  # DDP: (.+)$", text, re.M)
        above = re.findall(r"^ *# DDP: (.+)\n *(.+)$", text, re.M)
        for code, reason in commented + [pair[::-1] for pair in above]:
            reason = reason.partition(",")[0]  # exercise 8 says more
            reasons.setdefault(code, set()).add(reason)
    assert len(reasons) > 20
    assert not [code for code, found in reasons.items() if len(found) > 1]


def test_no_two_docstrings_open_with_the_same_line():
    openings = [t.split("\n")[0] for s, t in TEXTS.items() if "clinic" not in s]
    assert len({*openings}) == len(openings)


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_can_be_projected(script):
    lines = TEXTS[script].splitlines()
    assert len(lines) < 200
    assert max(map(len, lines)) <= 85
    opening = "\n".join(lines[:10])  # it opens with the command that runs it
    assert re.search(r"^    sbatch (run|slurm_|jobscript)\S*\.sh", opening, re.M)


def test_the_tables_have_the_row_counts():
    rows = {(left, right): count_rows(left, right) for left, right, *_ in PAIRS}
    expected = {
        (title, left, right, tag, str(rows[left, right]))
        for left, right, tag, _, title in PAIRS
    }
    row = r"^\| (.+) \| `(\S+\.py)` \| `(\S+\.py)` \| (\w+) \| (\d+) \|$"
    table = re.findall(row, (REPOSITORY / "docs/PAIRS.md").read_text(), re.M)
    assert {*table} == expected
    text = (REPOSITORY / "cinic_lab/README.md").read_text()
    row = r"^\| .+ \| `(\w+\.py)` \| `(\w+\.py)` \| (\d+) \|"
    for right, left, number in re.findall(row, text, re.M):
        assert rows[f"cinic_lab/{left}", f"cinic_lab/{right}"] == int(number)
