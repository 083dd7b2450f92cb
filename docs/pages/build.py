"""Builds build/pages/: the site, which needs no server and no network.

    make pages

It has a page for each Markdown file and each pair, a sheet to print of each lesson's
questions, and the files that these link to.
"""

import os
import shutil
from html import escape
from pathlib import Path
from string import Template

import pair
import texts
from texts import FILES, LESSONS, LINKED, PAGES, REPOSITORY, Renderer, title_of

HERE = Path(__file__).resolve().parent
PAGE = Template((HERE / "page.html").read_text())
PAIR = Template((HERE / "pair.html").read_text())


def pair_name(left, right):
    return f"{Path(left).name} to {os.path.relpath(right, Path(left).parent)}"


def contents(page):
    """Return links to all lessons and other texts, and to all of the current one."""

    def link(where, name):
        here = " aria-current=page" * (where == page)
        return (
            f'<li><a href="{Renderer("", page).to(where)}"{here}>{escape(name)}</a>'
        )

    def link_text(file):
        return link(texts.address(file), title_of(file))

    html = [link_text("README.md")]
    for folder in LESSONS:
        html.append(link_text(f"{folder}/README.md"))
        if page.split("/")[0] == folder:
            html += ["<li><ul>", *map(link_text, texts.texts_of(folder)[1:])]
            html.append(link(f"{folder}/ANSWERS.html", "Answers"))
            html.append(link(f"{folder}/ROWS.html", "Changed lines"))
            html.append(link(f"{folder}/questions.html", "Questions to print"))
            for scripts, where in PAGES.items():
                if where.startswith(f"{folder}/"):
                    html.append(link(where, pair_name(*scripts)))
            html.append("</ul>")
    others = [f for f in FILES if f.endswith("/README.md")]
    others = [f for f in others if f.split("/")[0] not in LESSONS]
    html += map(link_text, [*others, *texts.texts_of("docs"), "CONTRIBUTING.md"])
    return "<ul>" + "\n".join(html) + "</ul>"


def pair_page(left, right, page):
    body, changed = pair.table(left, right, page)
    tags = {scripts[:2]: scripts[2] for scripts in texts.PAIRS}
    return PAIR.substitute(
        left=left,
        right=right,
        left_name=Path(left).name,
        right_name=os.path.relpath(right, Path(left).parent),
        changed=f"{changed} changed line{'s' * (changed > 1)}",
        tag=tags[left, right],
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


def build(out):
    """Write the site into this folder, in place of what is there."""
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    for file in ("pages.css", "stacked.css", "pages.js"):
        shutil.copy(HERE / file, out)

    def write(page, title, html, kind="text", links=""):
        to, folder = Renderer("", page).to, page.split("/")[0]
        if folder in LESSONS:
            lesson = title_of(f"{folder}/README.md")
            links = f'<a href="{to(folder + "/index.html")}">{lesson}</a> {links}'
        (out / page).parent.mkdir(parents=True, exist_ok=True)
        page_html = PAGE.substitute(
            root=to("."),
            title=escape(title),
            kind=kind,
            links=links,
            html=html if "<main>" in html else f"</header><main>{html}",
            contents=contents(page),
        )
        (out / page).write_text(page_html)

    for folder in LESSONS:
        page = f"{folder}/questions.html"
        write(page, "Questions to print", texts.sheet(folder, page), "sheet")
    pages = [*PAGES.values()]
    for n, (scripts, page) in enumerate(PAGES.items()):
        to, before = Renderer("", page).to, pages[n - 1]
        after = pages[(n + 1) % len(pages)]
        links = f'<a href="{to(before)}" rel=prev>previous pair <kbd>,</kbd></a> '
        links += f'<a href="{to(after)}" rel=next>next pair <kbd>.</kbd></a>'
        write(page, pair_name(*scripts), pair_page(*scripts, page), "pairs", links)
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
