"""A pair side by side: changed lines beside what they were, with explanations.

In ROWS.md, the text below an indented block explains the lines of the block. A
script's line is found by its comment, else by its code, in the ROWS.md of its folder
or in dp_ddp_intro/ROWS.md. Adjacent lines with one explanation are one change.
"""

import os
import re
import subprocess
from difflib import SequenceMatcher
from functools import cache
from html import escape
from itertools import combinations, groupby
from pathlib import Path
from typing import NamedTuple

from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer

REPOSITORY = Path(__file__).resolve().parents[2]
CONTEXT = 3  # lines beside a change that are not folded
WORDS = {"|": "changed", ">": "only on the right", "<": "only on the left"}
ALIKE = 0.5  # of two lines: above this, the words that differ are marked


class Row(NamedTuple):
    """Two lines and their numbers. A line that a script does not have is None."""

    left_number: int
    left: str | None
    mark: str  # of diff -y
    right_number: int
    right: str | None

    @property
    def line(self):
        return self.left if self.right is None else self.right


def read(file):
    return (REPOSITORY / file).read_text()


def absolute(text, file):
    """Return Markdown with the links of this file, for another page."""
    addresses = dict(re.findall(r"^\[([\w-]+)\]: (\S+)", read(file), re.M))

    def address(found):
        return f"]({addresses[found[1]]})" if found[1] in addresses else found[0]

    def link(found):
        path = os.path.normpath(Path(file).parent / found[1]) if found[1] else file
        return f"](/{path}{found[2] or ''})"

    text = re.sub(r"\]\[([\w-]+)\]", address, text)
    return re.sub(r"\]\((?!\w+:|/)([^)#\s]*)(#[^)\s]*)?\)", link, text)


def comment(row, tag=True):
    """Return what finds a line's explanation: its comment, else its code."""
    if row.strip().startswith('"""'):
        return "the docstring's first line"
    found = re.search(r"# ([A-Z]+: )(.+)$", row)
    if not found:
        return row.strip()
    return found[1] + found[2] if tag else found[2]


@cache
def explanations(folder):
    """Return {comment, with its tag and without: Markdown}."""
    found = {}
    for file in (f"{folder}/ROWS.md", "dp_ddp_intro/ROWS.md"):
        text = re.sub(r"^```.*?^```", "", read(file), flags=re.M | re.S)
        block = r"((?:^ {4}[^\n]*\n)+)\n(.*?)(?=^ {4}|^#|\Z)"
        for rows, why in re.findall(block, text, re.M | re.S):
            why = absolute(why.strip(), file)
            for row in rows.splitlines() if why else ():
                for words in comment(row), comment(row, tag=False):
                    found.setdefault(words, why)
    return found


def explain(row, folder):
    """Return a line's explanation, as Markdown."""
    found, words = explanations(folder), comment(row, tag=False)
    return found.get(comment(row)) or found.get(words, "")


def words_of(row):
    """Return the words and signs of a line's code, without a tag's comment."""
    code = re.sub(r" *# [A-Z]+: .*", "", row)
    return re.findall(r"\w+|\s+|.", code)


@cache
def compare(old, new):
    return SequenceMatcher(None, words_of(old), words_of(new), autojunk=False)


def oppose(lefts, rights):
    """Return pairs of lines: each left one beside the right one most like it."""
    rights = rights + [None] * (len(lefts) - len(rights))
    places = range(len(rights))

    def likeness(chosen):
        pairs = zip(lefts, (rights[n] or "" for n in chosen), strict=True)
        return sum(compare(*pair).ratio() for pair in pairs)

    chosen = max(combinations(places, len(lefts)), key=likeness)
    olds = dict(zip(chosen, lefts, strict=True))
    return [(olds.get(n), rights[n]) for n in places]


def align(left, right):
    """Return the Rows of two scripts.

    Equal lines are those of diff. A changed line stands beside the one most like it.
    """
    command = ["diff", "-U", "1000000", left, right]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    rows, i, j = [], 0, 0
    lines = done.stdout.splitlines()[3:]  # after the names and the @@
    for equal, group in groupby(lines, key=lambda line: line[0] == " "):
        group = [*group]
        lefts = [line[1:] for line in group if line[0] in " -"]
        rights = [line[1:] for line in group if line[0] in " +"]
        pairs = zip(lefts, rights, strict=True) if equal else oppose(lefts, rights)
        for old, new in pairs:
            mark = (
                " " if equal else ">" if old is None else "<" if new is None else "|"
            )
            i += old is not None
            j += new is not None
            rows.append(Row(i, old, mark, j, new))
    return rows


def changes(rows, folder):
    """Yield each change of a hunk: its rows and its explanation."""
    reasons = []
    for row in rows:
        bracket = reasons and not re.search(r"\w", row.line)
        reasons.append(reasons[-1] if bracket else explain(row.line, folder))
    grouped = groupby(zip(rows, reasons, strict=True), key=lambda pair: pair[1])
    for why, group in grouped:
        yield [row for row, _ in group], why


def fold(rows):
    """Yield the rows in parts, with a kind: "change", "near" one, or "fold"."""
    for equal, group in groupby(rows, key=lambda row: row.mark == " "):
        group = [*group]
        first = 0 if group[0] is rows[0] else CONTEXT
        last = len(group) - (0 if group[-1] is rows[-1] else CONTEXT)
        if not equal or last - first < CONTEXT:
            yield "near" if equal else "change", group
        else:
            yield "near", group[:first]
            yield "fold", group[first:last]
            yield "near", group[last:]


def mark_words(html, ranges):
    """Return a line's HTML with <b> around these (first, last) characters."""
    wanted = {n for first, last in ranges for n in range(first, last)}
    out, place = "", 0
    for piece in re.findall(r"<[^>]*>|&\w+;|&#\w+;|.", html):
        if piece[0] != "<" or len(piece) == 1:
            piece, place = f"<b>{piece}</b>" if place in wanted else piece, place + 1
        out += piece
    return out.replace("</b><b>", "")


def differing(old, new):
    """Return the ranges of characters that differ in two lines that are alike."""
    matcher, ranges = compare(old, new), ([], [])
    if matcher.ratio() < ALIKE:
        return ranges
    for kind, *places in matcher.get_opcodes():
        if kind != "equal":
            for side, words in enumerate((matcher.a, matcher.b)):
                first, last = places[2 * side : 2 * side + 2]
                before, here = "".join(words[:first]), "".join(words[first:last])
                ranges[side].append((len(before), len(before + here.rstrip())))
    return ranges


def colours(file):
    """Return a script's lines as HTML."""
    lexer, formatter = PythonLexer(stripnl=False), HtmlFormatter(nowrap=True)
    return highlight(read(file), lexer, formatter).splitlines()


def cells(row, lefts, rights):
    """Return (left number and line, mark, right number and line) as HTML."""
    i, old, mark, j, new = row
    old_html = "" if old is None else lefts[i]
    new_html = "" if new is None else rights[j]
    if mark == "|" and 'class="sd"' not in old_html + new_html:  # no docstring
        old_ranges, new_ranges = differing(old, new)
        old_html = mark_words(old_html, old_ranges)
        new_html = mark_words(new_html, new_ranges)

    def line(number, text, html):
        if text is None:
            return "<td><td>"
        indent = len(text) - len(text.lstrip())
        style = f' style="--indent:{indent}"' if indent else ""
        return f"<td>{number}<td{style}>{html}"

    return line(i, old, old_html), escape(mark.strip()), line(j, new, new_html)


def equal_lines(kind, rows, lefts, rights):
    """Yield the HTML of equal lines, with a button above folded ones."""
    if kind == "fold":
        button = f"<button aria-expanded=false>{len(rows)} equal lines</button>"
        yield f"<tbody class=opens><tr><td colspan=5>{button}"
    yield f"<tbody class={kind}>"
    for row in rows:
        old_line, _, new_line = cells(row, lefts, rights)
        yield f"<tr id=r{row.right_number}>{old_line}<td>{new_line}"


def changed_lines(name, rows, why, lefts, rights):
    """Yield the HTML of a change and its explanation. Its first mark is a link."""
    label = f"line {rows[0].right_number}, {WORDS[rows[0].mark]}"
    if len(rows) > 1:
        label += f" and {len(rows) - 1} more"
    link = f'<a href="#{name}" aria-describedby="why-{name}" aria-label="{label}">'
    yield f'<tbody id="{name}" class=change>'
    for row in rows:
        old_line, mark, new_line = cells(row, lefts, rights)
        if row is rows[0]:
            mark = f"{link}{mark}</a>"
        yield f"<tr class=row>{old_line}<td>{mark}{new_line}"
    yield f'<tr class=why><td colspan=5 id="why-{name}">\n\n{why}\n'
    yield "</td></tr>"


def table(left, right):
    """Return a pair's <tbody>s, one for each change, explained in Markdown."""
    html, names, folder = [], set(), right.split("/")[0]
    # Lines are numbered from 1.
    lefts, rights = (["", *colours(file)] for file in (left, right))
    for kind, group in fold(align(left, right)):
        if kind != "change":
            html += equal_lines(kind, group, lefts, rights)
            continue
        for rows, why in changes(group, folder):
            words = comment(rows[0].line, tag=False).lower()
            name = re.sub(r"\W+", "-", words).strip("-")
            if name in names or not name:
                name += f"-{rows[0].right_number}"
            names.add(name)
            html += changed_lines(name, rows, why, lefts, rights)
    return "\n".join(html)
