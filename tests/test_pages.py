"""The site: what its visitors would notice."""

import re
import shutil
import subprocess
import sys
from html import unescape

import pytest
from conftest import REPOSITORY

sys.path.append(str(REPOSITORY / "docs/pages"))
import build
import pair
import texts
from texts import LESSONS, PAGES

LEFT, RIGHT = "dp_ddp_intro/single.py", "dp_ddp_intro/ddp.py"
each_pair = pytest.mark.parametrize("left, right", PAGES)


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """Return a folder with the pages."""
    folder = tmp_path_factory.mktemp("pages") / "pages"
    build.build(folder)
    return folder


def without_tags(html):
    """Return the text of HTML, without spaces."""
    return "".join(unescape(re.sub("<.*?>", "", html)).split())


def new_rows(left, right):
    """Return the changed lines; of one that the right script lacks, the left one."""
    rows = pair.align(left, right)
    return [
        old if new is None else new for _, old, mark, _, new in rows if mark != " "
    ]


def read_changes(html):
    """Return {name: (its rows, the words of its explanation)} of a pair's table."""
    change = r'<tbody id="(.*?)" class=change>(.*?)(?=<tbody|\Z)'
    found = {}
    for name, body in re.findall(change, html, re.S):
        rows, _, why = body.partition("<tr class=why>")
        words = re.sub("<.*?>", "", why).split()
        found[name] = rows.split("<tr class=row>")[1:], words
    return found


@each_pair
def test_every_change_is_explained(left, right):
    html, number = pair.table(left, right)
    changes = read_changes(html)
    assert len(changes) == number and all(changes)  # a bracket alone has no name
    rows = sum(len(rows) for rows, _ in changes.values())
    assert rows == len(new_rows(left, right))
    assert rows + html.count("<tr id=r") == len(pair.align(left, right))
    for name, (_, words) in changes.items():
        assert 8 <= len(words) <= 130, f"{name}: {' '.join(words)}"


@each_pair
def test_rows_are_those_of_diff(left, right):
    command = ["diff", "-t", "-W", "200", "-y", left, right]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    theirs, ours = done.stdout.splitlines(), pair.align(left, right)
    for row, (_, old, mark, _, new) in zip(theirs, ours, strict=True):
        equal = not row[98:101].strip()
        assert equal == (mark == " ")
        if equal:
            assert (row[:98].rstrip(), row[102:].rstrip()) == (old, new)
    for file, side in ((left, 1), (right, 4)):
        lines = [row[side] for row in ours if row[side] is not None]
        assert lines == (REPOSITORY / file).read_text().splitlines()


@pytest.mark.parametrize("folder", LESSONS)
def test_every_explained_row_is_in_a_script(folder):
    own = [scripts for scripts in PAGES if scripts[1].startswith(f"{folder}/")]
    known = {row.strip() for scripts in own for row in new_rows(*scripts)}
    text = (REPOSITORY / folder / "ROWS.md").read_text()
    shown = [row.strip() for row in re.findall(r"^ {4}(.+)$", text, re.M)]
    assert shown and {*shown} <= known
    assert len({pair.comment(row) for row in shown}) == len(shown)


def test_the_words_that_differ_are_marked():
    html, _ = pair.table(LEFT, RIGHT)
    rows, _ = read_changes(html)["each-rank-has-its-own-random-numbers"]
    marked = "".join(re.findall("<b>(.*?)</b>", rows[0]))
    assert without_tags(marked) == "+rank"


def test_every_link_leads_somewhere_without_a_network(pages):
    shown = {page: page.read_text() for page in pages.rglob("*.html")}
    ids = {
        page: re.findall(r' id="?([^" >]+)', text) for page, text in shown.items()
    }
    for page, text in shown.items():
        assert len({*ids[page]}) == len(ids[page])
        linked = r'<(\w+)[^>]* (?:src|srcset|href)="?([^" >]+)'
        for tag, link in re.findall(linked, text):
            if not (tag == "a" and link.startswith("https://")):
                path, _, anchor = link.partition("#")
                target = (page.parent / path).resolve() if path else page
                assert target.is_file(), f"{page}: {link}"
                assert not anchor or anchor in ids[target], f"{page}: {link}"


@pytest.mark.parametrize("folder", LESSONS)
def test_answers_are_below_their_questions_and_not_on_the_sheet(folder, pages):
    def words(token, file):
        html = texts.Renderer(file, "").html(token["children"])
        return without_tags(html)

    source = f"{folder}/ANSWERS.md"
    found = texts.numbered(texts.parse(source))
    answers = {(heading, n): words(item, source) for heading, n, item in found}
    sheet = without_tags((pages / folder / "questions.html").read_text())
    for file in texts.texts_of(folder):
        shown = without_tags((pages / texts.address(file)).read_text())
        for heading, n, item in texts.numbered(texts.parse(file)):
            answer = answers.pop((heading, n))
            assert f"{words(item, file)}Answer{answer}" in shown
            assert words(item, file) in sheet and answer not in sheet
    assert not answers


def test_a_pair_is_listed_and_a_patient_has_its_question(pages):
    listed = (pages / "docs/PAIRS.html").read_text()
    for (_, right), page in PAGES.items():
        assert f'href="../{page}"' in listed
        if right.startswith("clinic"):
            number = re.search(r"\d+", right)[0]
            text = (pages / page).read_text()
            assert re.findall(r"<li value=(\d+)", text) == [number]


@pytest.fixture
def tab(pages):
    """Return a browser's tab with a pair; its console must stay empty."""
    playwright = pytest.importorskip("playwright.sync_api")
    if not (path := shutil.which("chromium")):
        pytest.skip("no Chromium here: run sudo apt-get install chromium")
    messages = []
    with playwright.sync_playwright() as play:
        browser = play.chromium.launch(executable_path=path, args=["--no-sandbox"])
        tab = browser.new_page(viewport={"width": 1280, "height": 720})
        tab.on("console", lambda message: messages.append(message.text))
        tab.on("pageerror", lambda error: messages.append(str(error)))
        tab.goto((pages / PAGES[LEFT, RIGHT]).as_uri())
        yield tab
    assert not messages


def check(tab):
    """Let axe look for what a reader who cannot see, or has no mouse, would miss."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    found = axe.run(tab, options={"preload": False})
    assert not found.violations_count, found.generate_report()


@pytest.mark.slow
def test_texts_are_accessible_also_on_a_phone(pages, tab):
    tab.goto((pages / "cinic_lab/index.html").as_uri())
    assert not tab.locator("details li:visible, details p:visible").count()
    for summary in tab.locator("summary").all():
        summary.click()
    check(tab)
    tab.set_viewport_size({"width": 390, "height": 844})
    assert tab.evaluate("document.documentElement.scrollWidth") <= 390


@pytest.mark.slow
def test_changes_are_chosen_by_keys_by_mouse_and_by_address(tab):
    (_, number), visited = pair.table(LEFT, RIGHT), []
    assert not tab.locator(".why:visible, .fold:visible").count()
    for _ in range(number + 1):  # the last one stays
        tab.keyboard.press("n")
        visited.append(tab.url)
        assert tab.locator(".why:visible").count() == 1
    assert len({*visited}) == number
    check(tab)
    tab.keyboard.press("p")
    assert tab.url == visited[-3]
    tab.goto(visited[4])
    assert tab.locator(":target .row").first.bounding_box()["y"] < 720
    tab.locator(".row .c1").last.click()
    assert tab.url == visited[-1]
    tab.keyboard.press("s")  # slides: one change on each
    assert tab.locator("#place").inner_text().startswith(f"change {number} of")
    check(tab)
