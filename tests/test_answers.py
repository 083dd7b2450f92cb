"""Each question of a README has a number, and an answer under the same number.

A question, or a thing to try, is an item of a numbered list. Its answer has the same
number under the same heading of ANSWERS.md.
"""

import re

import pytest
from conftest import EXERCISES, REPOSITORY


def read(text):
    """Return ({heading: numbers of its items}, lines of no item and no code)."""
    items, rest, heading, in_item = {}, [], "", False
    for line in text.splitlines():
        if found := re.match(r"#+ (.*)", line):
            heading, in_item = found[1], False
        elif found := re.match(r"(\d+)\. ", line):
            items.setdefault(heading, []).append(int(found[1]))
            in_item = True
        elif line and not line.startswith(" "):
            in_item = False
        if not in_item and not line.startswith("    "):
            rest.append(re.sub(r"`[^`]*`|\]\([^)]*\)", "", line))
    return items, rest


@pytest.mark.parametrize("exercise", [*EXERCISES, "dp_ddp_intro/beyond_ddp"])
def test_each_question_has_an_answer(exercise):
    asked, rest = read((REPOSITORY / exercise / "README.md").read_text())
    answered, _ = read((REPOSITORY / exercise / "ANSWERS.md").read_text())
    assert asked and asked == answered
    for heading, numbers in asked.items():
        assert numbers == list(range(1, len(numbers) + 1)), heading
    text = "\n".join(rest)
    assert not re.search(r"\?|(^|[.:;] )[Tt]ry\b", text, re.M), text


def test_what_counts_as_a_question():
    text = "# A\n1. Why?\n   And\n\n   - this?\n2. Try it\n\nNo.\n\n    code?\n"
    text += "## B\nWhy?\n"
    assert read(text) == ({"A": [1, 2]}, ["# A", "No.", "", "## B", "Why?"])
