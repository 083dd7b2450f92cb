"""The site: pages of texts and pairs; questions, their answers, explained lines."""

import os
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


def new_rows(left, right):
    return [new for _, _, mark, _, new in pair.align(left, right) if mark != " "]


@each_pair
def test_each_changed_row_is_explained(left, right):
    html, _ = pair.table(left, right)
    assert html.count("<tr id=") == len(pair.align(left, right))
    shown = re.findall(r'id="why-[^"]*">(.*?)(?=\n<t[rb]|\Z)', html, re.S)
    for row, why in zip(new_rows(left, right), shown, strict=True):
        words = re.sub("<.*?>", "", why).split()
        assert 8 <= len(words) <= 100, f"{row}: {' '.join(words)}"


@pytest.mark.parametrize("folder", LESSONS)
def test_each_explained_row_is_in_a_script(folder):
    own = [scripts for scripts in PAGES if scripts[1].startswith(f"{folder}/")]
    known = {row.strip() for scripts in own for row in new_rows(*scripts)}
    text = (REPOSITORY / folder / "ROWS.md").read_text()
    shown = [row.strip() for row in re.findall(r"^ {4}(.+)$", text, re.M)]
    assert shown and {*shown} <= known
    assert len({pair.comment(row) for row in shown}) == len(shown)


@each_pair
def test_rows_are_aligned_as_by_diff(left, right):
    command = ["diff", "-t", "-W", "200", "-y", left, right]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    theirs, ours = done.stdout.splitlines(), pair.align(left, right)
    for row, (_, old, mark, _, new) in zip(theirs, ours, strict=True):
        assert (row[:98].rstrip(), row[102:].rstrip()) == (old or "", new or "")
        assert row[98:101].strip() == mark.strip()


def test_each_link_leads_somewhere_without_a_network(pages):
    shown = {page: page.read_text() for page in pages.rglob("*.html")}
    ids = {
        page: re.findall(r' id="?([^" >]+)', text) for page, text in shown.items()
    }
    for page, text in shown.items():
        assert len({*ids[page]}) == len(ids[page])
        assert "|--" not in re.sub(r"<pre.*?</pre>", "", text, flags=re.S), page
        for tag, link in re.findall(r'<(\w+)[^>]* (?:src|href)="?([^" >]+)', text):
            if not (tag == "a" and link.startswith("https://")):
                path, _, anchor = link.partition("#")
                target = (page.parent / path).resolve() if path else page
                assert target.is_file(), f"{page}: {link}"
                assert not anchor or anchor in ids[target], f"{page}: {link}"


def words(token, file):
    """Return the text of a question or an answer as in read_page()."""
    html = texts.Renderer(file, "").html(token["children"])
    return "".join(unescape(re.sub("<.*?>", "", html)).split())


def read_page(page):
    return "".join(unescape(re.sub("<.*?>", "", page.read_text())).split())


@pytest.mark.parametrize("folder", LESSONS)
def test_answers_are_below_their_questions_and_not_on_the_sheet(folder, pages):
    source = f"{folder}/ANSWERS.md"
    found = texts.numbered(texts.parse(source))
    answers = {(heading, n): words(item, source) for heading, n, item in found}
    sheet = read_page(pages / folder / "questions.html")
    for file in texts.texts_of(folder):
        shown = read_page(pages / texts.address(file))
        for heading, n, item in texts.numbered(texts.parse(file)):
            answer = answers.pop((heading, n))
            assert f"{words(item, file)}Answer{answer}" in shown
            assert words(item, file) in sheet and answer not in sheet
    assert not answers


def test_a_pair_is_listed_and_has_the_questions_about_it(pages):
    listed = (pages / "docs/PAIRS.html").read_text()
    sections = (REPOSITORY / "beyond_ddp/README.md").read_text().split("\n## ")
    for (left, right), page in PAGES.items():
        text = (pages / page).read_text()
        assert f'href="../{page}"' in listed
        if right.startswith("clinic"):  # one question for each patient
            number = re.search(r"\d+", right)[0]
            assert re.findall(r"<li value=(\d+)", text) == [number]
        names = [os.path.relpath(script, "beyond_ddp") for script in (left, right)]
        for section in sections:
            if f"diff -W 180 -y {' '.join(names)} | less" in section:
                assert f"#{texts.anchor(section.splitlines()[0])}" in text


@pytest.fixture(scope="module")
def chromium():
    playwright = pytest.importorskip("playwright.sync_api")
    if not (path := shutil.which("chromium")):
        pytest.skip("no Chromium here: run sudo apt-get install chromium")
    with playwright.sync_playwright() as play:
        yield play.chromium.launch(executable_path=path, args=["--no-sandbox"])


@pytest.fixture
def tab(chromium, pages):
    """Return a tab with a pair; its console must stay empty."""
    tab, messages = chromium.new_page(viewport={"width": 1280, "height": 720}), []
    tab.on("console", lambda message: messages.append(message.text))
    tab.on("pageerror", lambda error: messages.append(str(error)))
    tab.open = lambda page: tab.goto((pages / page).as_uri())
    tab.key = tab.keyboard.press
    tab.open(PAGES[LEFT, RIGHT])
    yield tab
    tab.close()
    assert not messages


def check(tab):
    """Let axe look for what a reader who cannot see, or has no mouse, would miss."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    found = axe.run(tab, options={"preload": False})
    assert not found.violations_count, found.generate_report()


@pytest.mark.slow
@pytest.mark.parametrize("page", ["index", "cinic_lab/index", "clinic/questions"])
def test_texts_are_accessible_also_on_a_phone(page, tab):
    tab.open(f"{page}.html")
    assert not tab.locator("details li:visible, details p:visible").count()
    for summary in tab.locator("summary").all():
        summary.click()
    check(tab)
    tab.set_viewport_size({"width": 390, "height": 844})
    assert tab.evaluate("document.documentElement.scrollWidth") <= 390


@pytest.mark.slow
def test_changes_are_chosen_by_keys_by_mouse_and_by_address(tab):
    number, visited = len(new_rows(LEFT, RIGHT)), []
    assert not tab.locator(".why:visible").count()
    for _ in range(number + 1):  # the last one stays
        tab.key("n")
        visited.append(tab.url)
        assert tab.locator(".why:visible").count() == 1
    assert len({*visited}) == number
    check(tab)
    tab.key("p")
    assert tab.url == visited[-3]
    tab.goto(visited[4])
    assert tab.locator(".row:target").bounding_box()["y"] < 720
    tab.locator(".row .c1").last.click()
    assert tab.url == visited[-1]


@pytest.mark.slow
def test_equal_rows_are_folded(tab):
    folds, shown = tab.locator(".fold"), tab.locator(".fold:visible")
    assert folds.count() and not shown.count()
    tab.get_by_role("button", name="Show").first.click()
    assert shown.count() == 1
    tab.key("f")
    assert shown.count() == folds.count()
    tab.key("f")
    address = f"{tab.url}#{folds.locator('tr').first.get_attribute('id')}"
    tab.goto("about:blank")
    tab.goto(address)
    assert shown.count() == 1


@pytest.mark.slow
def test_slides_show_one_change_as_large_as_it_can_be(tab):
    rows = tab.locator(".row")
    tab.key("s")
    for number in (1, 2):
        assert tab.locator("#place").inner_text().startswith(f"change {number} of")
        assert tab.locator(".row:target").is_visible() and not rows.last.is_visible()
        assert tab.evaluate("document.documentElement.scrollHeight") <= 720
        tab.key("PageDown")
    check(tab)
    tab.key("Escape")
    assert rows.last.is_visible()


@pytest.mark.slow
def test_what_is_chosen_is_kept_on_the_next_page(tab):
    colour = "getComputedStyle(document.body).backgroundColor"
    here, light = tab.url, tab.evaluate(colour)
    tab.key("d")
    dark = tab.evaluate(colour)
    with tab.expect_navigation():
        tab.key(".")
    assert tab.url != here and tab.evaluate(colour) == dark != light
    check(tab)


def test_on_a_phone_changes_are_inline(tab):
    tab.set_viewport_size({"width": 390, "height": 844})
    changed = tab.locator(".row", has=tab.locator("[aria-label*=changed]")).first
    old, new = (changed.locator("td").nth(n).bounding_box() for n in (1, 4))
    assert old["x"] == new["x"] and old["y"] < new["y"]


@pytest.mark.parametrize("side", [1, 4])
def test_one_side_is_copied(side, tab):
    cells = tab.locator(f".near td:nth-child({side + 1})")
    first = [*map(str.strip, cells.all_inner_texts())].index("import time")
    cells.nth(first).hover(position={"x": 1, "y": 5})
    tab.mouse.down()
    cells.nth(first + 2).hover()  # beyond its text
    tab.mouse.up()
    copied = tab.evaluate("String(getSelection())").split("\n")
    assert [*filter(str.strip, copied)] == ["import time", "import torch"]
