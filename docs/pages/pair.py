"""A pair side by side: its lines as diff -y aligns them, with explanations.

The text below an indented block explains the lines that equal one of the block, or
have its comment: in their folder's ROWS.md or README.md, or in dp_ddp_intro/ROWS.md.
"""

import re
import subprocess
from functools import cache
from html import escape
from itertools import groupby, zip_longest

from texts import REPOSITORY, Renderer, colours

CONTEXT = 3  # lines beside a change that are not folded
WORDS = {"|": "changed", ">": "only on the right", "<": "only on the left"}


def comment(row, tag=True):
    """Return what finds a line's explanation: its comment, else its code."""
    if row.strip().startswith('"""'):
        return "the docstring's first line"
    found = re.search(r"# ([A-Z]+: )(.+)$", row)
    return found[1] * tag + found[2] if found else row.strip()


@cache
def explanations(folder):
    """Return {comment, with its tag and without: (Markdown, its file)}."""
    found = {}
    for file in (f"{folder}/ROWS.md", f"{folder}/README.md", "dp_ddp_intro/ROWS.md"):
        text = (REPOSITORY / file).read_text()
        text = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
        block = r"((?:^ {4}[^\n]*\n)+)\n(.*?)(?=^ {4}|^#|\Z)"
        for rows, why in re.findall(block, text, re.M | re.S):
            for row in rows.splitlines() if why.strip() else ():
                found.setdefault(comment(row), (why.strip(), file))
                found.setdefault(comment(row, tag=False), (why.strip(), file))
    return found


def explain(row, folder, page=""):
    """Return a line's explanation as HTML of this page, or ""."""
    found, words = explanations(folder), comment(row, tag=False)
    text, file = found.get(comment(row)) or found.get(words) or ("", "")
    return Renderer(file, page).parse(text)


def align(left, right):
    """Return [(left number, left row, mark, right number, right row)] as diff -y."""
    command = ["diff", "-U", "1000000", left, right]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    rows, i, j = [], 0, 0
    lines = done.stdout.splitlines()[3:]  # after the names and the @@
    for equal, group in groupby(lines, key=lambda line: line[0] == " "):
        group = [*group]
        lefts = [line[1:] for line in group if line[0] in " -"]
        rights = [line[1:] for line in group if line[0] in " +"]
        for old, new in zip_longest(lefts, rights):
            i, j = i + (old is not None), j + (new is not None)
            mark = ">" if old is None else "<" if new is None else "|"
            rows.append((i, old, " " if equal else mark, j, new))
    return rows


def fold(rows):
    """Yield the rows in parts, with a kind: "change", "near" one, or "fold"."""
    for equal, group in groupby(rows, key=lambda row: row[2] == " "):
        group = [*group]
        first = 0 if group[0] is rows[0] else CONTEXT
        last = len(group) - (0 if group[-1] is rows[-1] else CONTEXT)
        if not equal or last - first < CONTEXT:
            yield "near" if equal else "change", group
        else:
            yield "near", group[:first]
            yield "fold", group[first:last]
            yield "near", group[last:]


def table(left, right, page=""):
    """Return the rows of a pair as HTML: <tbody>s, and how many are changed."""
    html, used, folder = [], set(), right.split("/")[0]
    # They are numbered from 1.
    lefts, rights = (["", *colours(file).splitlines()] for file in (left, right))
    rows = align(left, right)
    for kind, group in fold(rows):
        if kind == "fold":
            button = f"<button aria-expanded=false>{len(group)} equal lines</button>"
            html.append(f"<tbody><tr class=opens><td colspan=5>{button}")
        html.append(f"<tbody class={kind}>")
        reasons = [explain(new or "", folder, page) for *_, new in group]
        for n, (i, old, mark, j, new) in enumerate(group):
            old_cells = f"<td>{i}<td>{lefts[i]}" if old is not None else "<td><td>"
            new_cells = f"<td>{j}<td>{rights[j]}" if new is not None else "<td><td>"
            if mark == " ":
                html.append(f"<tr id=r{j}>{old_cells}<td>{new_cells}")
                continue
            words = comment(old if new is None else new, tag=False).lower()
            name = re.sub(r"\W+", "-", words).strip("-")
            name += f"-{j}" * (name in used)
            used.add(name)
            again = " again" * (reasons[n] in reasons[n + 1 :])  # paper has it once
            html.append(
                f'<tr id={name} class=row>{old_cells}<td><a href="#{name}" '
                f'aria-label="line {j}, {WORDS[mark]}" '
                f'aria-describedby="why-{name}">{escape(mark)}</a>{new_cells}\n'
                f'<tr class="why{again}"><td colspan=5 id="why-{name}">{reasons[n]}'
            )
    return "\n".join(html), len(used)
