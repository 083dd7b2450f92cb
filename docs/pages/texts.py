"""Texts as HTML: which page a file has, and Markdown that links to pages."""

import os
import re
import subprocess
from copy import deepcopy
from functools import cache
from html import escape, unescape
from pathlib import Path

import mistune
from mistune.plugins.table import table_in_list
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import BashLexer, TextLexer, find_lexer_class_for_filename

from tools.pairs import PAIRS

REPOSITORY = Path(__file__).resolve().parents[2]
PLUGINS = ["table", table_in_list]
GIT = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
FILES = subprocess.check_output(GIT, cwd=REPOSITORY, text=True).splitlines()
LINKED = [file for file in FILES if file.endswith(".md")]  # texts add to it
LINKED += {script for pair in PAIRS for script in pair[:2]}
# The lessons in the order of README.md's table, and {(left, right): its page}.
ROW = r"^\|[^|]*\|[^|]*?\]\((\w+)/README\.md\)"
README = (REPOSITORY / "README.md").read_text()
LESSONS = [*dict.fromkeys(re.findall(ROW, README, re.M))]
ORDER = sorted(PAIRS, key=lambda pair: LESSONS.index(pair[1].split("/")[0]))
PAGES = {
    (left, right): f"{right.removesuffix('.py')}-after-{Path(left).stem}.html"
    for left, right, *_ in ORDER
}


def texts_of(folder):
    """Return a folder's Markdown files, except ANSWERS.md and ROWS.md."""
    name = re.compile(rf"{folder}/(?!ANSWERS|ROWS)[^/]+\.md")
    return sorted(
        filter(name.fullmatch, FILES), key=lambda f: ("README" not in f, f)
    )


def address(file):
    """Return the page of a file or a folder."""
    if (REPOSITORY / file).is_dir():
        return f"{file}/index.html"
    if file.endswith((".png", ".svg", ".ipynb", ".json")):
        return file
    return file.replace("README.md", "index.md").removesuffix(".md") + ".html"


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
        if token["type"] not in ("block_html", "answer")
    )


def title_of(file):
    return next(plain(t) for t in parse(file) if t["type"] == "heading")


def anchor(heading):
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")


def numbered(tokens):
    """Yield (heading above it, number, item) of each numbered item: a question."""
    heading = ""
    for token in tokens:
        if token["type"] == "heading":
            heading = plain(token)
        elif token["type"] == "list" and token["attrs"]["ordered"]:
            start = token["attrs"].get("start", 1)
            for number, item in enumerate(token["children"], start):
                yield heading, number, item


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
            item["children"].append({"type": "answer", "raw": html})
    return tokens


def colours(file):
    """Return a file's text as HTML."""
    text = (REPOSITORY / file).read_text()
    lexer = find_lexer_class_for_filename(file) or TextLexer
    return highlight(text, lexer(stripnl=False), HtmlFormatter(nowrap=True))


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
        if file not in LINKED:
            LINKED.append(file)
        pages = [page for pair, page in PAGES.items() if pair[1] == file]
        return self.to(PAGES.get((left, file), [*pages, address(file)][0]))

    def to_url(self, url):
        if re.match(r"\w+:", url):
            return url
        path, mark, name = url.partition("#")
        file = resolve(self.folder / path) if path else self.file
        if (REPOSITORY / file / "README.md").exists():
            file = os.path.normpath(f"{file}/README.md")
        return self.to_file(file) + mark + name

    def link(self, text, url, title=None):
        return f'<a href="{self.to_url(url)}">{re.sub("<a .*?>|</a>", "", text)}</a>'

    def image(self, text, url, title=None):
        return f'<img src="{self.to_url(url)}" alt="{text}">'

    def block_html(self, html):
        return self.inline_html(html) + "\n"

    def inline_html(self, html):
        def to_url(found):
            return f'{found[1]}="{self.to_url(found[2])}"'

        return re.sub(r'\b(href|src|srcset)="(.*?)"', to_url, html)

    def answer(self, html):  # its links lead from this page already
        return html

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
            if page := PAGES.get(tuple(find(n, self.folder) for n in names)):
                link = f'<a href="{self.to(page)}">{" to ".join(names)}</a>'
                links += f'<p class="diff">Side by side: {link}</p>'
        size = f'style="--columns: {max(map(len, code.splitlines()))}"'
        kind = ' class="bash"' * (info == "bash")
        return f'<pre{kind} tabindex="0" {size}><code>{html}</code></pre>{links}\n'


def named(*tokens):
    """Return the names of right scripts in a text."""
    names = {Path(right).name for _, right in PAGES}
    return names & {*re.findall(r"\w+\.py", plain(*tokens))}


def questions(right, page):
    """Return the questions of the first section that names this script, as HTML.

    Questions that name right scripts of other pairs alone are left out.
    """
    name = Path(right).name
    for file in texts_of(right.split("/")[0]):
        sections = []
        for token in read(file, page):
            if token["type"] == "heading" and token["attrs"]["level"] < 3:
                sections.append([])
            sections[-1].append(token)
        for section in sections:
            found = [(n, item) for _, n, item in numbered(section)]
            if found and name in named(*section):
                renderer, where = Renderer(file, page), plain(section[0])
                link = renderer.to(address(file)) + "#" + anchor(where)
                html = f'<a href="{link}">{escape(where)}</a><ol>'
                for n, item in found:
                    if name in (named(item) or {name}):
                        html += f"<li value={n}>{renderer.html(item['children'])}"
                html = f"<summary>Questions</summary>{html}</ol>"
                return f"<details class=questions open>{html}</details>"
    return ""


def sheet(folder, page):
    """Return the questions of a lesson as HTML, without answers."""
    html = f"<h1>Questions: {escape(title_of(f'{folder}/README.md'))}</h1>\n"
    html += "<p class=name>Name <span></span> Date <span></span></p>\n"
    for file in texts_of(folder):
        renderer, above, heading = Renderer(file, page), [], []
        other = "README" not in file  # its title is above its questions
        for token in parse(file):
            if token["type"] == "heading" and token["attrs"]["level"] > 1:
                heading = [{**token, "attrs": {"level": 2 + other}}]
            elif token["type"] == "heading" and other:
                above = [{**token, "attrs": {"level": 2}}]
            elif [*numbered([token])]:
                html += renderer.html([*above, *heading, token])
                above, heading = [], []
    return html
