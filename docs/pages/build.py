"""Builds build/pages/: a page for each pair of scripts, and an index of all.

    make pages
    python docs/pages/build.py --picture docs/img/diff.png

They need no server and no network. What a page says of a row stands in README.md or
ROWS.md of its folder, else in dp_ddp_intro/ROWS.md: the text below an indented block
that has the row. It is found by the row's comment.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
from html import escape
from itertools import groupby, zip_longest
from pathlib import Path
from string import Template

import markdown
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer

sys.path.append(str(Path(__file__).resolve().parents[2] / "bench"))
from pairs import PAIRS

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[1]
FIRST = "dp_ddp_intro"  # the room that explains what all have
CONTEXT = 3  # rows beside a change that are not folded
WORDS = {"|": "changed", ">": "only on the right", "<": "only on the left"}
PICTURE = "dp_ddp_intro-ddp-after-single.html#deals-out-shares"
# Where links to files lead: on GitHub's machine to the repository there.
SOURCE = "../../"
if name := os.environ.get("GITHUB_REPOSITORY"):
    SOURCE = f"{os.environ['GITHUB_SERVER_URL']}/{name}/blob/HEAD/"


def room_of(script):
    """Return the exercise's folder, relative to the repository."""
    folder = Path(script).parent
    while not (REPOSITORY / folder / "README.md").exists():
        folder = folder.parent
    return folder.as_posix()


def comment(row, tag=True):
    """Return what finds a row's explanation: its comment, else its code."""
    found = re.search(r"# ([A-Z]+: )(.+)$", row)
    return found[1] * tag + found[2] if found else row.strip()


def explanations(*files):
    """Return {comment, with its tag and without: Markdown} of these files."""
    found = {}
    for file in [file for file in files if file.exists()]:
        text = re.sub(r"^```.*?^```", "", file.read_text(), flags=re.M | re.S)
        blocks = re.findall(
            r"((?:^ {4}[^\n]*\n)+)\n(.*?)(?=^ {4}|^#|\Z)", text, re.M | re.S
        )
        for rows, why in blocks:
            for row in rows.splitlines() if why.strip() else ():
                found.setdefault(comment(row), why.strip())
                found.setdefault(comment(row, tag=False), why.strip())
    return found


def explain(room):
    """Return a function of a row: its explanation in HTML, or ""."""
    folder = REPOSITORY / room
    own = explanations(folder / "ROWS.md", folder / "README.md")
    general = explanations(REPOSITORY / FIRST / "ROWS.md")

    def why(row):
        words = comment(row, tag=False)
        text = own.get(comment(row)) or own.get(words) or general.get(words, "")
        html = markdown.markdown(text, extensions=["tables", "fenced_code"])
        return re.sub(r'(href|src)="(?!\w+:|#)', rf'\1="{SOURCE}{room}/', html)

    return why


def align(left, right):
    """Return [(left number, left row, mark, right number, right row)] as diff -y."""
    command = ["diff", "-U", "1000000", left, right]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    rows, i, j = [], 0, 0
    lines = done.stdout.splitlines()[3:]  # after the names and the @@
    for alike, group in groupby(lines, key=lambda line: line[0] == " "):
        group = [*group]
        lefts = [line[1:] for line in group if line[0] in " -"]
        rights = [line[1:] for line in group if line[0] in " +"]
        for old, new in zip_longest(lefts, rights):
            i, j = i + (old is not None), j + (new is not None)
            mark = ">" if old is None else "<" if new is None else "|"
            rows.append((i, old, " " if alike else mark, j, new))
    return rows


def fold(rows):
    """Yield the rows in parts, with a kind: "change", "near" one, or "fold"."""
    for alike, group in groupby(rows, key=lambda row: row[2] == " "):
        group = [*group]
        first = 0 if group[0] is rows[0] else CONTEXT
        last = len(group) - (0 if group[-1] is rows[-1] else CONTEXT)
        if not alike:
            yield "change", group
        elif last - first < CONTEXT:
            yield "near", group
        else:
            yield "near", group[:first]
            yield "fold", group[first:last]
            yield "near", group[last:]


def colours(script):
    """Return the rows of a script in HTML."""
    text = (REPOSITORY / script).read_text()
    html = highlight(text, PythonLexer(stripnl=False), HtmlFormatter(nowrap=True))
    return ["", *html.splitlines()]  # they are numbered from 1


def table(left, right):
    """Return the rows of a pair as HTML: <tbody>s, and how many are changed."""
    html, used, why = [], set(), explain(room_of(right))
    lefts, rights = colours(left), colours(right)
    rows = align(left, right)
    for kind, group in fold(rows):
        if kind == "fold":
            button = f"<button aria-expanded=false>{len(group)} equal rows</button>"
            html.append(f"<tbody><tr class=opens><td colspan=5>{button}")
        html.append(f"<tbody class={kind}>")
        texts = [why(new or "") for *_, new in group] if kind == "change" else []
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
            again = " again" * (texts[n] in texts[n + 1 :])  # paper has it once
            html.append(
                f'<tr id={name} class=row>{old_cells}<td><a href="#{name}" '
                f'aria-label="row {j}, {WORDS[mark]}" aria-describedby="why-{name}">'
                f"{escape(mark)}</a>{new_cells}\n"
                f'<tr class="why{again}"><td colspan=5 id="why-{name}">{texts[n]}'
            )
    return "\n".join(html), len(used)


def lessons():
    """Yield (room, what you train, what you learn, its pairs) of README.md."""
    text, left_out = (REPOSITORY / "README.md").read_text(), {*PAIRS}
    line = r"^\| \d \| \[([\w/]+)\][^|]*\| (.+?) \| (.+?) \|$"
    rows = re.findall(line, text, re.M)
    for room, train, learn in rows:
        pairs = [pair for pair in PAIRS if room_of(pair[1]) == room]
        left_out -= {*pairs}
        yield room, train, learn, pairs
    assert not left_out, f"README.md does not list the folder of {left_out}"


def address(pair):
    left, right = (Path(script).with_suffix("") for script in pair[:2])
    return f"{right.as_posix().replace('/', '-')}-after-{left.name}.html"


def fill(file, out, **values):
    (out).write_text(Template((HERE / file).read_text()).substitute(values))


def build(out):
    """Write the pages into this folder, in place of those there."""
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    for file in ("pages.css", "stacked.css", "pages.js"):
        shutil.copy(HERE / file, out)
    rooms, index = [*lessons()], []
    addresses = [address(pair) for *_, pairs in rooms for pair in pairs]
    for room, train, learn, pairs in rooms:
        title = (REPOSITORY / room / "README.md").read_text().splitlines()[0][2:]
        readme = f"{SOURCE}{room}/README.md"
        learn = markdown.markdown(f"{learn[0].upper()}{learn[1:]}.")[3:]  # no <p>
        index.append(
            f"<h2>{title}</h2><p><a href={readme}>{room}</a>: {train}. {learn}"
            "<table><thead><tr><th scope=col>from<th scope=col>to<th scope=col>tag"
            "<th scope=col>changed rows<tbody>"
        )
        for left, right, tag, _ in pairs:
            page, (body, changed) = address((left, right)), table(left, right)
            sides = [(REPOSITORY / script).read_text() for script in (left, right)]
            n = addresses.index(page)
            fill(
                "page.html",
                out / page,
                left=left,
                right=right,
                left_name=Path(left).name,
                right_name=Path(right).name,
                tag=tag,
                changed=changed,
                columns=max(map(len, "\n".join(sides).splitlines())),
                room=room,
                readme=readme,
                before=addresses[n - 1],
                after=addresses[(n + 1) % len(addresses)],
                body=body,
            )
            link = f"<a href={page}>{Path(right).name}</a>"
            link += ", a solution" * ("solutions" in right)
            cells = f"<code>{Path(left).name}</code>", link, tag, str(changed)
            index.append("<tr><td>" + "<td>".join(cells))
        index.append("</table>")
    values = {"lessons": "\n".join(index), "readme": f"{SOURCE}README.md"}
    fill("index.html", out / "index.html", **values)
    return addresses


def take_picture(path, page, file):
    """Save a PNG of a page, as the Chromium at this path shows it."""
    from playwright.sync_api import sync_playwright

    view = {"viewport": {"width": 1280, "height": 560}, "device_scale_factor": 2}
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=path, args=["--no-sandbox"])
        tab = browser.new_page(**view)
        tab.goto(page)
        tab.screenshot(path=file)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    picture = "a PNG to write of one of them; default: none"
    parser.add_argument("--picture", type=Path, metavar="FILE", help=picture)
    args = parser.parse_args()
    browser = shutil.which("chromium")
    if args.picture and not browser:
        parser.error("no Chromium here: run sudo apt-get install chromium")
    pages = build(out := REPOSITORY / "build/pages")
    if args.picture:
        take_picture(browser, f"{out.as_uri()}/{PICTURE}", args.picture)
    print(f"{len(pages)} pairs: open {os.path.relpath(out)}/index.html")
