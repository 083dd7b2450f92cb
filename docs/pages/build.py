"""Builds build/pages/: the site, which needs no server and no network.

    make pages
    python docs/pages/build.py --picture docs/img/diff.png

It has a page for each Markdown file and each pair, a sheet to print of each lesson's
questions, and the files that these link to. A changed line's explanation is the text
below an indented block with this line or its comment, in its folder's ROWS.md or
README.md, or else in dp_ddp_intro/ROWS.md. A pair's questions are those of the first
section that names its right script.
"""

import argparse
import os
import re
import shutil
import subprocess
from copy import deepcopy
from functools import cache
from html import escape, unescape
from itertools import groupby, zip_longest
from pathlib import Path
from string import Template

import mistune
from mistune.plugins.table import table_in_list
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import BashLexer, TextLexer, find_lexer_class_for_filename

from tools.pairs import PAIRS

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[1]
FIRST = "dp_ddp_intro"  # the lesson that explains what all have
PLUGINS = ["table", table_in_list]
CONTEXT = 3  # lines beside a change that are not folded
WORDS = {"|": "changed", ">": "only on the right", "<": "only on the left"}
PICTURE = (
    "dp_ddp_intro/ddp_unfinished-after-single.html#averages-gradients-in-backward"
)
GIT = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
FILES = subprocess.check_output(GIT, cwd=REPOSITORY, text=True).splitlines()
LINKED = set()  # the files that any page links to


def folder_of(file):
    """Return the folder of a file's lesson, relative to the repository."""
    folder = Path(file).parent
    while not (REPOSITORY / folder / "README.md").exists():
        folder = folder.parent
    return folder.as_posix()


def texts(folder):
    """Return a folder's texts: Markdown files, but neither ANSWERS nor ROWS."""
    names = [
        f for f in FILES if f.endswith(".md") and Path(f).parent == Path(folder)
    ]
    names = [f for f in names if not f.endswith(("ANSWERS.md", "ROWS.md"))]
    return sorted(names, key=lambda f: ("README" not in f, f))


@cache
def lessons():
    """Return the lessons' folders, in the order of README.md's table."""
    text = (REPOSITORY / "README.md").read_text()
    lesson_folders = re.findall(
        r"^\|[^|]*\|[^|]*?\]\(([\w/]+)/README\.md\)", text, re.M
    )
    left_out = {folder_of(right) for _, right, *_ in PAIRS} - {*lesson_folders}
    assert not left_out, f"README.md does not list {left_out}"
    return [*dict.fromkeys(lesson_folders)]


@cache
def pairs():
    """Return {(left, right): its page} in the order of the lessons."""
    order = sorted(PAIRS, key=lambda pair: lessons().index(folder_of(pair[1])))
    return {
        (left, right): f"{Path(right).with_suffix('')}-after-{Path(left).stem}.html"
        for left, right, *_ in order
    }


def pair_name(left, right):
    return f"{Path(left).name} to {os.path.relpath(right, Path(left).parent)}"


def address(file):
    """Return the page of a file or a folder."""
    path = Path(file)
    if path.name == "README.md" or (REPOSITORY / file).is_dir():
        return str((path.parent if path.suffix else path) / "index.html")
    if path.suffix in (".png", ".ipynb"):
        return str(path)
    return f"{path.with_suffix('') if path.suffix == '.md' else path}.html"


def resolve(path):
    """Return a path relative to the repository, without symbolic links."""
    return os.path.relpath((REPOSITORY / path).resolve(), REPOSITORY)


def find(name, folder):
    """Return the file that a text in this folder means by a name, or None."""
    if re.fullmatch(r"[\w./-]+", name):
        files = [resolve(start / name) for start in (folder, *folder.parents)]
        return next((file for file in files if file in FILES), None)


@cache
def parse(file):
    parser = mistune.create_markdown(renderer=None, plugins=PLUGINS)
    return parser((REPOSITORY / file).read_text())


def plain(*tokens):
    """Return the text of tokens, without markup and HTML."""
    return "".join(
        token.get("raw") or plain(*token.get("children", ()))
        for token in tokens
        if token["type"] != "block_html"
    )


def title_of(file):
    return next(plain(t) for t in parse(file) if t["type"] == "heading")


def anchor(heading):
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")


def is_numbered(token):
    return token["type"] == "list" and token["attrs"]["ordered"]


def numbered(tokens):
    """Yield (heading above it, number, item) of each numbered item: a question."""
    heading = ""
    for token in tokens:
        if token["type"] == "heading":
            heading = plain(token)
        elif is_numbered(token):
            start = token["attrs"].get("start", 1)
            for number, item in enumerate(token["children"], start):
                yield heading, number, item


class Renderer(mistune.HTMLRenderer):
    """Markdown of a file as HTML of a page. It links to pages, not to files."""

    def __init__(self, file, page):
        super().__init__(escape=False)
        self.file, self.folder, self.page = file, Path(file).parent, page
        self.parse = mistune.create_markdown(renderer=self, plugins=PLUGINS)
        self.script = None

    def html(self, tokens):
        return self.render_tokens(tokens, None)

    def to(self, page):
        return os.path.relpath(page, Path(self.page).parent)

    def to_file(self, file, left=None):
        """Return where a file is: a right script on its pair's page."""
        found = [page for pair, page in pairs().items() if pair[1] == file]
        if not found:
            LINKED.add(file)
        return self.to(pairs().get((left, file), [*found, address(file)][0]))

    def to_url(self, url):
        if re.match(r"\w+:", url):
            return url
        path, mark, name = url.partition("#")
        file = resolve(self.folder / path) if path else self.file
        if (REPOSITORY / file / "README.md").exists():
            file = os.path.normpath(f"{file}/README.md")
        elif file not in FILES and not (REPOSITORY / file).is_dir():
            raise SystemExit(f"Error: {self.file} links to {url}: no such file")
        return self.to_file(file) + mark + name

    def link(self, text, url, title=None):
        return f'<a href="{self.to_url(url)}">{re.sub("<a .*?>|</a>", "", text)}</a>'

    def image(self, text, url, title=None):
        return f'<img src="{self.to_url(url)}" alt="{text}">'

    def codespan(self, text):
        """Link the name of a file; a right script after its left one to the pair."""
        code, file = super().codespan(text), find(text, self.folder)
        if not file or file == self.file:
            return code
        left, self.script = self.script, file
        return f'<a href="{self.to_file(file, left)}">{code}</a>'

    def heading(self, text, level, **_):
        name = anchor(unescape(re.sub("<.*?>", "", text)))
        return f'<h{level} id="{name}">{text}</h{level}>\n'

    def table(self, text):
        text = text.replace("<th></th>", "<td></td>")  # heads nothing
        return f'<div class="wide" tabindex="0"><table>{text}</table></div>\n'

    def block_code(self, code, info=None):
        """Highlight commands, and link the pages of the diffs among them."""
        html, links = escape(code), ""
        if info == "bash":
            html = highlight(code, BashLexer(), HtmlFormatter(nowrap=True))
        for names in re.findall(r"^diff .*?(\S+\.py) (\S+\.py)", code, re.M):
            if page := pairs().get(tuple(find(n, self.folder) for n in names)):
                link = f'<a href="{self.to(page)}">{" to ".join(names)}</a>'
                links += f'<p class="diff">Side by side: {link}</p>'
        size = f'style="--columns: {max(map(len, code.splitlines()))}"'
        return f'<pre tabindex="0" {size}><code>{html}</code></pre>{links}\n'


def read(file, page):
    """Return a file's tokens for a page, with the answers in its numbered items."""
    tokens, source = deepcopy(parse(file)), f"{Path(file).parent}/ANSWERS.md"
    if source not in FILES or file == source:
        return tokens
    answers = {(where, n): item for where, n, item in numbered(parse(source))}
    for where, n, item in numbered(tokens):
        if answer := answers.get((where, n)):
            html = Renderer(source, page).html(answer["children"])
            html = f"<details><summary>Answer</summary>{html}</details>"
            item["children"].append({"type": "block_html", "raw": html})
    return tokens


def questions(right, page):
    """Return the questions of the first section that names this script, as HTML.

    Questions that name right scripts of other pairs alone are left out.
    """

    def named(*tokens):
        text = plain(*tokens)
        return {n for n in names if re.search(rf"(?<!\w){re.escape(n)}", text)}

    names, name = {Path(pair[1]).name for pair in PAIRS}, Path(right).name
    for file in texts(folder_of(right)):
        sections = []
        for token in read(file, page):
            if token["type"] == "heading" and token["attrs"]["level"] < 3:
                sections.append([])
            sections[-1].append(token)
        for section in sections:
            found = [(n, item) for _, n, item in numbered(section)]
            if not found or name not in named(*section):
                continue
            found = [(n, i) for n, i in found if name in (named(i) or {name})]
            renderer, where = Renderer(file, page), plain(section[0])
            link = renderer.to(address(file)) + "#" + anchor(where)
            html = f'<a href="{link}">{escape(where)}</a><ol>'
            for n, item in found:
                html += f"<li value={n}>{renderer.html(item['children'])}"
            summary = "<summary>Questions</summary>"
            return f"<details class=questions open>{summary}{html}</ol></details>"
    return ""


def comment(row, tag=True):
    """Return what finds a line's explanation: its comment, else its code."""
    if row.strip().startswith(('"""', "sbatch ")):
        return "the docstring"
    found = re.search(r"# ([A-Z]+: )(.+)$", row)
    return found[1] * tag + found[2] if found else row.strip()


def explanations(*files):
    """Return {comment, with its tag and without: (Markdown, its file)}."""
    found = {}
    for file in [file for file in files if file in FILES]:
        text = (REPOSITORY / file).read_text()
        text = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
        blocks = re.findall(
            r"((?:^ {4}[^\n]*\n)+)\n(.*?)(?=^ {4}|^#|\Z)", text, re.M | re.S
        )
        for rows, why in blocks:
            for row in rows.splitlines() if why.strip() else ():
                found.setdefault(comment(row), (why.strip(), file))
                found.setdefault(comment(row, tag=False), (why.strip(), file))
    return found


def explain(folder, page=""):
    """Return a function of a line: its explanation as HTML of this page, or ""."""
    own = explanations(f"{folder}/ROWS.md", f"{folder}/README.md")
    general = explanations(f"{FIRST}/ROWS.md")

    def why(row):
        words = comment(row, tag=False)
        found = own.get(comment(row)) or own.get(words) or general.get(words)
        return Renderer(found[1], page).parse(found[0]) if found else ""

    return why


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
        if not equal:
            yield "change", group
        elif last - first < CONTEXT:
            yield "near", group
        else:
            yield "near", group[:first]
            yield "fold", group[first:last]
            yield "near", group[last:]


def colours(file):
    """Return a file's text in HTML."""
    text = (REPOSITORY / file).read_text()
    lexer = find_lexer_class_for_filename(file) or TextLexer
    return highlight(text, lexer(stripnl=False), HtmlFormatter(nowrap=True))


def table(left, right, page=""):
    """Return the rows of a pair as HTML: <tbody>s, and how many are changed."""
    html, used, why = [], set(), explain(folder_of(right), page)
    # They are numbered from 1.
    lefts, rights = (["", *colours(file).splitlines()] for file in (left, right))
    rows = align(left, right)
    for kind, group in fold(rows):
        if kind == "fold":
            button = f"<button aria-expanded=false>{len(group)} equal lines</button>"
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
                f'aria-label="line {j}, {WORDS[mark]}" '
                f'aria-describedby="why-{name}">{escape(mark)}</a>{new_cells}\n'
                f'<tr class="why{again}"><td colspan=5 id="why-{name}">{texts[n]}'
            )
    return "\n".join(html), len(used)


def contents(page):
    """Return links to all lessons and other texts, and to all of the current one."""
    to, html = Renderer("", page).to, []

    def link(where, name):
        here = " aria-current=page" * (where == page)
        html.append(f'<li><a href="{to(where)}"{here}>{escape(name)}</a>')

    def link_text(file):
        link(address(file), title_of(file))

    link_text("README.md")
    for folder in lessons():
        link_text(f"{folder}/README.md")
        if folder_of(page) == folder:
            html.append("<li><ul>")
            for file in texts(folder)[1:]:
                link_text(file)
            link(f"{folder}/ANSWERS.html", "Answers")
            link(f"{folder}/ROWS.html", "Changed lines")
            link(f"{folder}/questions.html", "Questions to print")
            for pair, where in pairs().items():
                if folder_of(pair[1]) == folder:
                    link(where, pair_name(*pair))
            html.append("</ul>")
    others = [f for f in FILES if f.endswith("/README.md")]
    others = [f for f in others if folder_of(f) not in lessons()]
    for file in (*others, *texts("docs"), "CONTRIBUTING.md"):
        link_text(file)
    return "<ul>" + "\n".join(html) + "</ul>"


def sheet(folder, page):
    """Return the questions of a lesson as HTML, without answers."""
    html = f"<h1>{escape(title_of(f'{folder}/README.md'))}</h1>\n"
    for file in texts(folder):
        heading, renderer = [], Renderer(file, page)
        for token in parse(file):
            if token["type"] == "heading":
                heading = [{**token, "attrs": {"level": 2}}]
            elif is_numbered(token):
                html += renderer.html([*heading, token])
                heading = []
    return html


def pair_page(pair, page):
    left, right = pair
    body, changed = table(left, right, page)
    sides = "\n".join((REPOSITORY / script).read_text() for script in pair)
    LINKED.update(pair)
    names = pair_name(left, right).split(" to ")
    links = [Renderer("", page).to(address(script)) for script in pair]
    return fill(
        "pair.html",
        left=left,
        right=right,
        left_link=f'<a href="{links[0]}"><code>{names[0]}</code></a>',
        right_link=f'<a href="{links[1]}"><code>{names[1]}</code></a>',
        changed=f"{changed} changed line{'s' * (changed > 1)}",
        tag=next(tag for *scripts, tag, _ in PAIRS if tuple(scripts) == pair),
        columns=max(map(len, sides.splitlines())),
        questions=questions(right, page),
        root=Renderer("", page).to("."),
        body=body,
    )


def file_page(file, page):
    """Return a file's text as HTML, or what is in a folder."""
    if not (REPOSITORY / file).is_dir():
        return f"<h1>{file}</h1><pre tabindex=0><code>{colours(file)}</code></pre>"
    renderer = Renderer(f"{file}/", page)
    names = [Path(f).name for f in FILES if Path(f).parent == Path(file)]
    items = [f"<li>{renderer.codespan(name)}" for name in names]
    return f"<h1>{file}</h1><ul>{''.join(items)}</ul>"


def fill(template, **values):
    return Template((HERE / template).read_text()).substitute(values)


def build(out):
    """Write the site into this folder, in place of what is there."""
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    for file in ("pages.css", "stacked.css", "pages.js"):
        shutil.copy(HERE / file, out)

    def write(page, title, html, kind="text", links=()):
        to, folder = Renderer("", page).to, folder_of(page)
        if folder in lessons():
            lesson = to(f"{folder}/index.html"), title_of(f"{folder}/README.md"), ""
            links = [lesson, *links]
        text = fill(
            "page.html",
            root=to("."),
            title=escape(title),
            kind=kind,
            links=" ".join(f'<a href="{a}"{b}>{name}</a>' for a, name, b in links),
            html=html if "<main>" in html else f"</header><main>{html}",
            contents=contents(page),
        )
        (out / page).parent.mkdir(parents=True, exist_ok=True)
        (out / page).write_text(text)

    done = {file for file in FILES if file.endswith(".md")}
    for file in done:
        html = Renderer(file, address(file)).html(read(file, address(file)))
        write(address(file), title_of(file), html)
    for folder in lessons():
        page = f"{folder}/questions.html"
        write(page, "Questions to print", sheet(folder, page), "sheet")
    pages = [*pairs().values()]
    for n, (pair, page) in enumerate(pairs().items()):
        to = Renderer("", page).to
        before, after = to(pages[n - 1]), to(pages[(n + 1) % len(pages)])
        links = [(before, "previous pair <kbd>,</kbd>", " rel=prev")]
        links += [(after, "next pair <kbd>.</kbd>", " rel=next")]
        write(page, pair_name(*pair), pair_page(pair, page), "pairs", links)
    while LINKED - done:  # a folder's page links to more
        for file in LINKED - done:
            if (page := address(file)) == file:
                (out / page).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(REPOSITORY / file, out / page)
            else:
                write(page, file, file_page(file, page))
            done.add(file)
    return pages


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
    build(out := REPOSITORY / "build/pages")
    if args.picture:
        take_picture(browser, f"{out.as_uri()}/{PICTURE}", args.picture)
    print(f"Open {os.path.relpath(out)}/index.html")
