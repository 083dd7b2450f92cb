"""The site: what its visitors would notice."""

import re
import shutil
import subprocess
import sys
from html import unescape
from pathlib import Path

import pytest
from conftest import REPOSITORY, run

sys.path.append(str(REPOSITORY / "docs/site"))
import pages
import pair
from pages import LESSONS, PAGES

LEFT, RIGHT = "dp_ddp_intro/single.py", "dp_ddp_intro/ddp.py"
each_pair = pytest.mark.parametrize("left, right", PAGES)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Return a folder with the site, whose links Sphinx has followed."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-q", "-E", "-W"]
    command += ["-j", "2", "-c", "docs/site", "-d", folder / "doctrees"]
    done = run([*command, ".", folder / "html"], REPOSITORY)
    assert done.returncode == 0, done.stderr
    return folder / "html"


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
    html = pair.table(left, right)
    changes = read_changes(html)
    assert all(changes)  # a bracket alone has no name
    rows = sum(len(rows) for rows, _ in changes.values())
    assert rows == len(new_rows(left, right))
    assert rows + html.count("<tr id=r") == len(pair.align(left, right))
    for name, (_, words) in changes.items():
        assert 8 <= len(words) <= 130, f"{name}: {' '.join(words)}"


@each_pair
def test_equal_lines_are_those_of_diff(left, right):
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
    for rows, _ in read_changes(pair.table(LEFT, RIGHT)).values():
        if "manual_seed" in rows[0]:
            marked = "".join(re.findall("<b>(.*?)</b>", rows[0]))
    assert re.sub("<.*?>| ", "", marked) == "+rank"


@each_pair
def test_a_pair_shows_what_both_scripts_print(left, right):
    shown = pages.runs(left, right)
    assert shown.count("\n```text\n") == 2 and "```text\n```" not in shown


@pytest.mark.slow  # builds the site
def test_every_link_leads_somewhere_without_a_network(site):
    shown = {page: page.read_text() for page in site.rglob("*.html")}
    ids = {page: re.findall(r' id="?([^" >]+)', shown[page]) for page in shown}
    linked = r'<(\w+)[^>]* (?:src|srcset|href)="?([^" >]+)'
    for page, text in shown.items():
        for tag, link in re.findall(linked, text):
            if not (tag == "a" and link.startswith("https://")):
                path, _, anchor = unescape(link).partition("#")
                path = path.partition("?")[0]
                target = (page.parent / path).resolve() if path else page
                assert target.is_file(), f"{page}: {link}"
                assert not anchor or anchor in ids[target], f"{page}: {link}"


@pytest.mark.parametrize("folder", LESSONS)
def test_answers_are_below_their_questions_and_not_on_the_sheet(folder):
    found = pages.numbered(f"{folder}/ANSWERS.md")
    answers = {(heading, n): item for heading, n, item in found}
    assert answers
    sheet = pages.questions_page(folder)
    for file in pages.texts_of(folder):
        shown = pages.text_page(file, pages.read(file))
        for heading, n, item in pages.numbered(file):
            answer = answers.pop((heading, n))
            assert answer in shown and item in sheet and answer not in sheet
    assert not answers


@pytest.mark.slow  # builds the site
def test_a_pair_is_listed_and_leads_to_its_part_of_the_lesson(site):
    listed = (site / "docs/PAIRS.html").read_text()
    for (_, right), page in PAGES.items():
        assert f'href="../{page}.html"' in listed
        text = (site / f"{page}.html").read_text()
        (link,) = re.findall(r"In the lesson: <a [^>]*href=\"(.*?)\"", text)
        file, anchor = link.split("#")
        lesson = ((site / page).parent / file).read_text()
        part = lesson.partition(f'<section id="{anchor}">')[2]
        assert Path(right).name in part


@pytest.fixture
def tab(site):
    """Return a browser's tab; its console must stay empty."""
    playwright = pytest.importorskip("playwright.sync_api")
    if not (path := shutil.which("chromium")):
        pytest.skip("no Chromium here: run sudo apt-get install chromium")
    messages = []
    with playwright.sync_playwright() as play:
        browser = play.chromium.launch(executable_path=path, args=["--no-sandbox"])
        tab = browser.new_page(viewport={"width": 1280, "height": 720})
        tab.on("console", lambda message: messages.append(message.text))
        tab.on("pageerror", lambda error: messages.append(str(error)))
        yield tab
    assert not messages


TEXTS = ["index", "cinic_lab/README", "exercise8/questions", "common/device"]


@pytest.mark.slow
@pytest.mark.parametrize("page", [*TEXTS, PAGES[LEFT, RIGHT]])
def test_pages_are_accessible_and_fit_a_phone(page, site, tab):
    """Let axe look for what a reader who cannot see, or has no mouse, would miss."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    tab.goto((site / f"{page}.html").as_uri())
    assert not tab.locator("details li:visible, details p:visible").count()
    for summary in tab.locator("summary").all():
        summary.click()
    for theme in "light", "dark":
        tab.emulate_media(color_scheme=theme)
        found = axe.run(tab, options={"preload": False})
        assert not found.violations_count, found.generate_report()
    tab.set_viewport_size({"width": 390, "height": 844})
    assert tab.evaluate("document.documentElement.scrollWidth") <= 390


@pytest.mark.slow
def test_changes_are_chosen_by_keys_by_mouse_and_by_address(site, tab):
    visited, number = [], len(read_changes(pair.table(LEFT, RIGHT)))
    tab.goto((site / f"{PAGES[LEFT, RIGHT]}.html").as_uri())
    assert not tab.locator(".why:visible, .fold:visible").count()
    for _ in range(number + 1):  # the last one stays
        tab.keyboard.press("n")
        visited.append(tab.url)
        assert tab.locator(".why:visible").count() == 1
    assert len({*visited}) == number
    tab.keyboard.press("p")
    assert tab.url == visited[-3]
    tab.goto(visited[4])
    assert tab.locator(":target .row").first.bounding_box()["y"] < 720
    tab.locator(".row .c1").last.click()
    assert tab.url == visited[-1]
    tab.keyboard.press("s")  # slides: one change on each
    tab.keyboard.press("Home")
    assert tab.url == visited[0]
    assert tab.locator("#place").inner_text().startswith(f"change 1 of {number}")
    tab.keyboard.press("?")
    assert tab.locator("dialog").is_visible()
    for key in "?", "Escape", ".":
        tab.keyboard.press(key)
    tab.wait_for_url(lambda url: PAGES[LEFT, RIGHT] not in url)
