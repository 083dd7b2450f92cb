"""Builds build/pages/: the site, which needs no server and no network.

    make pages

It has a page for each Markdown file and each pair, a sheet to print of each lesson's
questions, and the files that these link to.
"""

import os
import re
import shutil
import subprocess
from html import escape, unescape
from pathlib import Path
from string import Template

import pair
import texts
from texts import FILES, LESSONS, LINKED, PAGES, REPOSITORY, Renderer, title_of

HERE = Path(__file__).resolve().parent
PAGE = Template((HERE / "page.html").read_text())
PAIR = Template((HERE / "pair.html").read_text())
TAGS = {(left, right): tag for left, right, tag, *_ in texts.PAIRS}
TITLES = {(left, right): title for left, right, *_, title in texts.PAIRS}


def repository_address():
    """Return the repository's address on the web, or "" if it has none."""
    if name := os.environ.get("GITHUB_REPOSITORY"):
        return f"{os.environ.get('GITHUB_SERVER_URL', 'https://github.com')}/{name}"
    command = ["git", "config", "remote.origin.url"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    address = re.sub(r"^git@([^:]+):", r"https://\1/", done.stdout.strip())
    address = re.sub("^https://[^/@]*@", "https://", address)  # no token is shown
    return address.removesuffix(".git") if address.startswith("https://") else ""


def short(folder):
    """Return a lesson's name without what it is about, such as Exercise 8."""
    return title_of(f"{folder}/README.md").partition(":")[0]


def contents(page, html):
    """Return links to all lessons and other texts, and to all of the current one.

    Below the page's own link are its headings.
    """
    headings = re.findall(r'<h2 id="(.*?)">(.*?)</h2>', html)

    def link(where, name):
        to, here = Renderer("", page).to(where), " aria-current=page"
        item = f'<li><a href="{to}"{here * (where == page)}>{escape(name)}</a>'
        if where == page and headings:
            item += "<ul class=here>"
            for anchor, heading in headings:
                words = re.sub("<.*?>", "", heading)
                item += f'<li><a href="#{anchor}">{words}</a>'
            item += "</ul>"
        return item

    def link_text(file):
        return link(texts.address(file), title_of(file))

    html = [link_text("README.md")]
    for folder in LESSONS:
        html.append(link_text(f"{folder}/README.md"))
        if page.split("/")[0] != folder:
            continue
        html += ["<li><ul>", *map(link_text, texts.texts_of(folder)[1:])]
        html.append(link(f"{folder}/questions.html", "Questions to print"))
        solutions = []
        for scripts, where in PAGES.items():
            if where.startswith(f"{folder}/"):
                solved = where.startswith(f"{folder}/solutions/")
                (solutions if solved else html).append(link(where, TITLES[scripts]))
        solutions.append(link(f"{folder}/ANSWERS.html", "Answers"))
        solutions.append(link(f"{folder}/ROWS.html", "Changed lines, explained"))
        shown = " open" * any("aria-current" in item for item in solutions)
        html.append(f"<li><details{shown}><summary>Solutions</summary><ul>")
        html += [*solutions, "</ul></details></ul>"]
    others = [f for f in FILES if f.endswith("/README.md")]
    others = [f for f in others if f.split("/")[0] not in LESSONS]
    html += map(link_text, [*others, *texts.texts_of("docs"), "CONTRIBUTING.md"])
    return "<ul>" + "\n".join(html) + "</ul>"


def neighbours(page):
    """Return links to the lessons before and after the one on this page, if any."""
    lessons = [texts.address(f"{folder}/README.md") for folder in LESSONS]
    if page not in lessons:
        return ""
    n, to, html = lessons.index(page), Renderer("", page).to, ""
    if n:
        html += f'<a href="{to(lessons[n - 1])}">← {short(LESSONS[n - 1])}</a>'
    if n + 1 < len(lessons):
        html += f'<a href="{to(lessons[n + 1])}">{short(LESSONS[n + 1])} →</a>'
    return f'<p class="lessons">{html}</p>'


def pair_page(left, right, page):
    body, changes = pair.table(left, right, page)
    lines = body.count("<tr class=row>")
    changed = f"{changes} change{'s' * (changes > 1)} in "
    changed += f"{lines} line{'s' * (lines > 1)}"
    return PAIR.substitute(
        title=TITLES[left, right],
        left=left,
        right=right,
        left_name=Path(left).name,
        right_name=os.path.relpath(right, Path(left).parent),
        changed=changed,
        tag=TAGS[left, right],
        questions=texts.questions(right, page),
        root=Renderer("", page).to("."),
        body=body,
    )


def file_page(file, page):
    """Return a title and HTML of a file, or of what is in a folder."""
    if file.endswith(".md"):
        return title_of(file), Renderer(file, page).html(texts.read(file, page))
    if (REPOSITORY / file).is_dir():
        names = [Path(f).name for f in FILES if Path(f).parent == Path(file)]
        text = f"# {file}\n" + "".join(f"- `{name}`\n" for name in names)
        return file, Renderer(f"{file}/README.md", page).parse(text)
    code = f"<pre tabindex=0><code>{texts.colours(file)}</code></pre>"
    return file, f"<h1>{file}</h1>{code}"


def describe(html, title):
    """Return a page's first sentences, for search engines and previews."""
    body = html.partition("</h1>")[2]
    words = re.sub(r"<(summary|button|kbd).*?</\1>|<.*?>", " ", body, flags=re.S)
    sentences = " ".join(unescape(words).split())[:150].rpartition(" ")[0]
    return escape(f"{title}. {sentences}")


def build(out):
    """Write the site into this folder, in place of what is there."""
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    for file in ("pages.css", "stacked.css", "pages.js", "favicon.svg"):
        shutil.copy(HERE / file, out)
    source = repository_address()

    def write(page, title, html, kind="text", links=""):
        to, folder = Renderer("", page).to, page.split("/")[0]
        if folder in LESSONS:
            lesson = title_of(f"{folder}/README.md")
            links = f'<a href="{to(folder + "/index.html")}">{lesson}</a> {links}'
            if title != lesson:
                title = f"{title}: {short(folder)}"
        if source:
            links += f' <a href="{source}">Repository</a>'
        (out / page).parent.mkdir(parents=True, exist_ok=True)
        page_html = PAGE.substitute(
            root=to("."),
            title=escape(title),
            description=describe(html, title),
            kind=kind,
            links=links,
            html=html if "<main>" in html else f"</header><main>{html}",
            after=neighbours(page),
            contents=contents(page, html),
        )
        (out / page).write_text(page_html)

    for folder in LESSONS:
        page = f"{folder}/questions.html"
        write(page, "Questions", texts.sheet(folder, page), "sheet")
    for scripts, page in PAGES.items():
        to, folder = Renderer("", page).to, page.split("/")[0]
        pages = [other for other in PAGES.values() if other.split("/")[0] == folder]
        n = pages.index(page)
        before, after = to(pages[n - 1]), to(pages[(n + 1) % len(pages)])
        links = f'<a href="{before}" rel=prev>previous pair <kbd>,</kbd></a> '
        links += f'<a href="{after}" rel=next>next pair <kbd>.</kbd></a>'
        write(page, TITLES[scripts], pair_page(*scripts, page), "pairs", links)
    for file in LINKED:  # it grows, since a text links to more
        page = texts.address(file)
        (out / page).parent.mkdir(parents=True, exist_ok=True)
        if page == file:
            shutil.copy(REPOSITORY / file, out / page)
        else:
            write(page, *file_page(file, page))


if __name__ == "__main__":
    build(out := REPOSITORY / "build/pages")
    print(f"Open {os.path.relpath(out)}/index.html")
