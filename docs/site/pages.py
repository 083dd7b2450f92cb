"""Sphinx extension that makes pages without a file, and adds to those with one.

Scripts, pairs of scripts and questions to print get pages of their own. A lesson's
questions get their answers, and its list of pages.
"""

import os
import re
from functools import partial
from pathlib import Path
from string import Template

from docutils import nodes
from sphinx.util.matching import get_matching_files

import pair
from pair import REPOSITORY, absolute, read
from tools.pairs import PAIRS

HERE = Path(__file__).resolve().parent
LEFT_OUT = [".*", "**/.*", "build", "data", "**/logs", "**/common", "*/tools"]
FILES = {*get_matching_files(REPOSITORY, exclude_patterns=LEFT_OUT)}
# The navigation.
GROUPS = {
    "Start here": [
        "How to run a lesson </README>",
        "docs/PAIRS",
        "docs/GLOSSARY",
        "docs/TROUBLESHOOTING",
    ],
    "Lessons": [],  # from README.md's table
    "For teachers": ["docs/TEACHING", "docs/FIVE_QUESTIONS"],
    "Your cluster": [
        "docs/CLUSTER",
        "docs/DATA",
        "docs/PYTORCH",
        "docs/ONE_GPU",
        "docs/TWO_MACHINES",
        "docs/KAGGLE",
    ],
    "Tools": [
        "tools/README",
        "tools/predict/README",
        "checkup/README",
        "CONTRIBUTING",
    ],
    "Measurements": ["docs/SPEEDUP", "bench/README", "docs/EXAMINED"],
}
# A row of README.md's table: a number, the lesson's folder, what one learns.
ROW = r"^\| (\d+) \| \[?(\w+).*\| (.*) \|$"
LIST_END = "\n\n<!-- -->\n\n"  # so that the next item keeps its number
# A block of code, a heading or a numbered item: a question or its answer.
PART = re.compile(
    r"^(?P<code>```.*?^```)|^#+ (?P<heading>.+?)$"
    r"|^(?P<number>\d\d?)\. (?P<item>.*?)(?=\n(?!\n| {3})|\Z)",
    re.M | re.S,
)


def title_of(file):
    return re.search("^# (.+)$", read(file), re.M)[1]


def short(folder):
    """Return a lesson's title without its subject, such as CIFAR-100."""
    return title_of(f"{folder}/README.md").partition(":")[0]


def find(name, folder):
    """Return the file that a text in this folder means by a name, or None."""
    for start in (folder, *folder.parents):
        file = os.path.relpath((REPOSITORY / start / name).resolve(), REPOSITORY)
        if file in FILES:
            return file


# The sources are the texts, the pairs' scripts, and the scripts that the texts name.
SOURCES = {file for file in FILES if file.endswith(".md")}
SOURCES |= {
    find(name, Path(file).parent)
    for file in SOURCES
    for name in re.findall(r"[`(]([\w./-]+\.(?:py|sh))[`)#]", read(file))
} | {script for pair in PAIRS for script in pair[:2]}
SOURCES -= {None, "docs/site/index.md", "docs/site/pair.md"}
ROWS = re.findall(ROW, read("README.md"), re.M)
LESSONS = {folder: [n for n, f, _ in ROWS if f == folder] for _, folder, _ in ROWS}
PAGES = {
    (left, right): f"{right.removesuffix('.py')}-after-{Path(left).stem}"
    for left, right, *_ in PAIRS
}
SCRIPTS = {page: scripts for scripts, page in PAGES.items()}
TITLES = {PAGES[left, right]: title for left, right, *_, title in PAIRS}
TAGS = {PAGES[left, right]: tag for left, right, tag, *_ in PAIRS}


def texts_of(folder):
    """Return a lesson's texts in the order in which README.md names them.

    ANSWERS.md, OUTPUT.md and ROWS.md are not among them.
    """
    text = re.compile(rf"{folder}/(?!ANSWERS|OUTPUT|ROWS)\w+\.md")
    readme = read(f"{folder}/README.md")

    def place(file):
        name = Path(file).name
        return name != "README.md", f"{readme}{name}".find(name)

    return sorted(filter(text.fullmatch, SOURCES), key=place)


def toctree(*lines):
    return "\n".join(["\n\n```{toctree}", ":hidden:", *lines, "```\n"])


def numbered(file):
    """Yield (heading above it, number, Markdown) of each question or answer."""
    heading = ""
    for part in PART.finditer(read(file)):
        heading = part["heading"] or heading
        if part["item"]:
            yield heading, part["number"], absolute(part["item"].rstrip(), file)


def answered(text, file):
    """Return a text with folded answers in its questions."""
    source = f"{Path(file).parent}/ANSWERS.md"
    if source not in SOURCES or file == source:
        return text
    answers = {(above, n): item for above, n, item in numbered(source)}
    heading = ""

    def answer(part):
        nonlocal heading
        heading = part["heading"] or heading
        if not (item := answers.get((heading, part["number"]))):
            return part[0]
        lines = "<details><summary>Answer</summary>", item, "</details>\n"
        return part[0].rstrip() + "".join(f"\n\n   {line}" for line in lines)

    return PART.sub(answer, text)


def with_diffs(text, file):
    """Return a text with a link to the pair's page below each command diff."""

    def link(block):
        out = block[0]
        for names in re.findall(r"^ *diff .*?(\S+\.py) (\S+\.py)", block[0], re.M):
            files = tuple(find(name, Path(file).parent) for name in names)
            if page := PAGES.get(files):
                title = " to ".join(names)
                out += f"\n\n{block[1]}Side by side: {{doc}}`{title} </{page}>`\n"
        return out

    return re.sub(r"^( *)```bash\n.*?^ *```$", link, text, flags=re.M | re.S)


def lists(file):
    """Return the list of a lesson's pages, for its README.md or its ANSWERS.md."""
    folder, name = os.path.split(file)
    pairs = [
        f"{TITLES[page]} </{page}>" for page in TITLES if page.startswith(folder)
    ]
    solved = [line for line in pairs if "/solutions/" in line]
    if folder in LESSONS and name == "ANSWERS.md":
        return toctree(*solved, f"Line by line </{folder}/ROWS>")
    if folder not in LESSONS or name != "README.md":
        return ""
    texts = [f"/{text.removesuffix('.md')}" for text in texts_of(folder)[1:]]
    shown = [line for line in pairs if line not in solved]
    names = {"OUTPUT": "What the scripts print", "questions": "Questions to print"}
    names["ANSWERS"] = "Answers"
    rest = [f"{title} </{folder}/{name}>" for name, title in names.items()]
    return toctree(*texts, *shown, *rest)


def script_page(file):
    """Return a script with line numbers, below links to its lesson and its pairs."""
    folder, language = (
        file.split("/")[0],
        "bash" if file.endswith(".sh") else "python",
    )
    pages = {page: TITLES[page] for page in PAGES.values() if file in SCRIPTS[page]}
    if folder in LESSONS:
        pages = {f"{folder}/README": short(folder), **pages}
    links = " · ".join(
        f"{{doc}}`{title} </{page}>`" for page, title in pages.items()
    )
    code = f"```{{literalinclude}} /{file}\n:language: {language}\n:linenos:\n```\n"
    options = "---\norphan: true\nnosearch: true\n---\n"
    return f"{options}# {file}\n\n{links}\n\n{code}"


def text_page(file, text):
    def pair_row(row):
        title, left, right = row.groups()
        return f"| {{doc}}`{title} </{PAGES[left, right]}>` | `{left}` | `{right}` |"

    if file == "README.md":  # the picture is on the index
        text = re.sub("^<p>.*?</p>$", "", text, flags=re.M | re.S)
    if file == "docs/PAIRS.md":
        row = r"^\| (.+?) \| `(\S+?\.py)` \| `(\S+?)` \|"
        text = re.sub(row, pair_row, text, flags=re.M)
    return with_diffs(answered(text, file), file) + lists(file)


def questions_page(folder):
    """Return a lesson's questions without answers, to print."""
    out = "---\nnosearch: true\n---\n"
    out += f"# Questions: {title_of(f'{folder}/README.md')}\n\n"
    out += '<p class="name">Name <span></span> Date <span></span></p>\n\n'
    for file in texts_of(folder):
        last, title = "", title_of(file)
        for heading, number, item in numbered(file):
            if heading != last:
                last = heading
                of = "" if "README" in file or heading == title else f"{title}: "
                out += f"## {of}{heading}\n\n"
            out += f"{number}. {item}{LIST_END}"
    return out


def index_page():
    """Return the index, with a card for each row of README.md's table."""
    minutes, of, cards = {}, "", ""
    row = r"^\| (?:(\d+) \w+)? ?\| .*? \| (\d+) \|"
    for number, time in re.findall(row, read("docs/TEACHING.md"), re.M):
        of = number or of
        minutes[of] = minutes.get(of, 0) + int(time)
    for number, folder, learnt in ROWS:
        again = "" if number == LESSONS[folder][0] else "continued: "
        cards += f"- **{number}. [{short(folder)}](/{folder}/README.md)**\n\n"
        cards += f"  {again}{absolute(learnt, 'README.md')}\n\n"
        cards += f"  {minutes[number] / 60:.1f} hours\n\n"
    lessons = (
        f"{' and '.join(numbers)}. {short(folder)} </{folder}/README>"
        for folder, numbers in LESSONS.items()
    )
    text = (HERE / "index.md").read_text().replace("CARDS", cards)
    for caption, files in GROUPS.items():
        text += toctree(f":caption: {caption}", "", *(files or lessons))
    return text


def section(script):
    """Return a link to the first section of the lesson that names this script."""
    name = Path(script).name
    for file in texts_of(script.split("/")[0]):
        for part in re.split("^##+ ", read(file), flags=re.M)[1:]:
            heading, _, text = part.partition("\n")
            if name in text:
                anchor = re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")
                return f"[{heading}](/{file}#{anchor})"


def output(script):
    """Return the part of its folder's OUTPUT.md on a script."""
    folder, _, name = script.partition("/")
    part = rf"^## {re.escape(name)}\n(.*?)(?=^## |\Z)"
    return re.search(part, read(f"{folder}/OUTPUT.md"), re.M | re.S)[1]


def runs(left, right):
    """Return the commands that run a pair, and what they print, as Markdown."""
    folder, other = left.split("/")[0], right.split("/")[0]
    start = "```bash\ncd {}\nsource common/env.sh\n```\n"
    again = start.format(f"../{other}") if other != folder else ""
    both = output(left), again + output(right)
    columns = "".join(f"<div>\n\n{column}\n\n</div>\n" for column in both)
    return f'{start.format(folder)}\n<div class="runs">\n{columns}</div>'


def pair_page(left, right):
    page, folder = PAGES[left, right], right.split("/")[0]
    pages = sorted(TITLES, key=lambda page: [*LESSONS].index(page.split("/")[0]))
    pages = [p for p in pages if ("/solutions/" in p) == ("/solutions/" in page)]
    n, body = pages.index(page), pair.table(left, right)
    return Template((HERE / "pair.md").read_text()).substitute(
        title=f"{short(folder)}: {TITLES[page]}",
        lesson=section(right),
        folder=folder,
        left=left,
        right=right,
        left_page=os.path.splitext(left)[0],
        right_page=os.path.splitext(right)[0],
        root=os.path.relpath(".", Path(page).parent),
        previous=pages[n - 1],
        next=pages[(n + 1) % len(pages)],
        changes=body.count("<tbody id="),
        lines=body.count("<tr class=row>"),
        tag=TAGS[page],
        runs=runs(left, right),
        body=body,
    )


# {page: (a file that it is made of, the function that returns its Markdown)}
MADE = {"index": ("docs/site/index.md", index_page)}
for folder in LESSONS:
    source = f"{folder}/README.md"
    MADE[f"{folder}/questions"] = source, partial(questions_page, folder)
for scripts, page in PAGES.items():
    MADE[page] = scripts[1], partial(pair_page, *scripts)


def add_pages(app, env, added, changed, removed):
    """Make Sphinx read the pages that are no files."""
    for page, (file, _) in MADE.items():
        env.project.docnames.add(page)
        env.project._docname_to_path[page] = Path(file)
    return [*MADE]


def write_markdown(app, docname, source):
    if docname in MADE:
        source[0] = MADE[docname][1]()
    else:
        file = os.path.relpath(app.env.doc2path(docname), REPOSITORY)
        is_text = file.endswith(".md")
        source[0] = text_page(file, source[0]) if is_text else script_page(file)


def link_names(app, doctree, docname):
    """Link the names of files."""
    for node in [*doctree.findall(nodes.literal)]:
        file = find(node.astext(), Path(docname).parent)
        if file not in SOURCES or isinstance(node.parent, nodes.reference):
            continue
        page = os.path.splitext(file)[0]
        if page != docname:
            where = app.builder.get_relative_uri(docname, page)
            link = nodes.reference(refuri=where, internal=True)
            node.replace_self(link)
            link += node


def mend_navigation(app, pagename, templatename, context, doctree):
    """Remove a role of Furo's checkboxes that needs an attribute they lack."""
    tree = context["furo_navigation_tree"]
    context["furo_navigation_tree"] = tree.replace(' role="switch"', "")


def setup(app):
    app.connect("env-get-outdated", add_pages)
    app.connect("source-read", write_markdown)
    app.connect("doctree-resolved", link_names)
    app.connect("html-page-context", mend_navigation, priority=600)  # Furo's has 500
    return {"parallel_read_safe": True, "parallel_write_safe": True}
