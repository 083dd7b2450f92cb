"""The rule of the pair, for every pair in the one list."""

import re
import subprocess

import pytest
from conftest import REPOSITORY

from common.pairs import PAIRS

SCRIPTS = sorted({script for pair in PAIRS for script in pair[:2]})
each_pair = pytest.mark.parametrize(
    "left, right, tag, most", PAIRS, ids=lambda x: str(x)
)


def differing_rows(left, right, *options):
    command = ["diff", "-W", "180", "-y", "--suppress-common-lines", *options]
    done = subprocess.run(
        [*command, left, right], cwd=REPOSITORY, capture_output=True
    )
    assert done.returncode < 2, done.stderr
    return len(done.stdout.splitlines())


@each_pair
def test_rows(left, right, tag, most):
    assert 0 < differing_rows(left, right) <= most


@each_pair
def test_nothing_is_reindented(left, right, tag, most):
    assert differing_rows(left, right) == differing_rows(left, right, "-w", "-B")


@each_pair
def test_every_hunk_explains_itself(left, right, tag, most):
    command = ["diff", "-U0", left, right]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    for hunk in re.split(r"^@@.*\n", done.stdout, flags=re.M)[1:]:
        new = [line for line in hunk.splitlines() if line.startswith("+")]
        assert any(re.search(rf"#.*\b{tag}\b", line) for line in new), hunk


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_can_be_projected(script):
    lines = (REPOSITORY / script).read_text().splitlines()
    assert len(lines) < 200
    assert max(map(len, lines)) <= 85
    opening = "\n".join(lines[:10])  # it opens with the command that runs it
    assert re.search(r"^    sbatch (run|slurm_|jobscript)\S*\.sh", opening, re.M)


def test_every_exercise_script_is_in_a_pair():
    found = REPOSITORY.glob("exercise8/**/pytorch_*.py")
    assert {str(path.relative_to(REPOSITORY)) for path in found} <= set(SCRIPTS)


def test_readme_has_the_row_counts():
    text = (REPOSITORY / "README.md").read_text()
    rows = re.findall(
        r"^\| `(\S+\.py)` \| `(\S+\.py)` \| (\w+) \| (\d+) \|$", text, re.M
    )
    table = {(left, right): (tag, int(count)) for left, right, tag, count in rows}
    for left, right, tag, _ in PAIRS:
        assert table[left, right] == (tag, differing_rows(left, right)), (
            left,
            right,
        )
    assert len(table) == len(PAIRS)
