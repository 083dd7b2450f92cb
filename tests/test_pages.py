"""The site: pages of texts and pairs; questions, their answers, explained lines."""

import os
import re
import shutil
import subprocess
import sys
from html import unescape

import pytest
from conftest import REPOSITORY

from pairs import PAIRS

sys.path.append(str(REPOSITORY / "docs/pages"))
import build

LEFT, RIGHT = PAIRS[0][:2]
BEYOND = (REPOSITORY / "beyond_ddp/README.md").read_text()
ROWS = [*REPOSITORY.glob("*/ROWS.md"), *REPOSITORY.glob("*/*/ROWS.md")]
each_pair = pytest.mark.parametrize("left, right", [pair[:2] for pair in PAIRS])


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """Return a folder with the pages."""
    folder = tmp_path_factory.mktemp("pages") / "pages"
    assert len({*build.build(folder)}) == len(PAIRS)
    return folder


def new_rows(left, right):
    return [new for _, _, mark, _, new in build.align(left, right) if mark != " "]


@each_pair
def test_each_changed_row_is_explained(left, right):
    why, (html, _) = build.explain(build.folder_of(right)), build.table(left, right)
    shown = re.findall(r'id="why-[^"]*">(.*?)(?=\n<t[rb]|\Z)', html, re.S)
    for row, text in zip(new_rows(left, right), shown, strict=True):
        words = re.sub("<.*?>", "", text).split()
        assert 8 <= len(words) <= 100, f"{row}: {' '.join(words)}"
        assert text.strip() == why(row).strip(), row


@pytest.mark.parametrize("file", ROWS, ids=lambda file: file.parent.name)
def test_each_explained_row_is_in_a_script(file):
    folder = file.parent.relative_to(REPOSITORY).as_posix()
    pairs = [pair for pair in PAIRS if build.folder_of(pair[1]) == folder]
    known = {row.strip() for pair in pairs for row in new_rows(*pair[:2])}
    shown = re.findall(r"^ {4}(.+)$", file.read_text(), re.M)
    assert shown and {row.strip() for row in shown} <= known
    assert len({build.comment(row) for row in shown}) == len(shown)
    why, own = build.explain(folder), build.explanations(f"{folder}/ROWS.md")
    for row in shown:  # not what another page says of such a row
        text, name = own[build.comment(row)]
        assert why(row) == build.Renderer(name, "").parse(text), row


@each_pair
def test_rows_are_aligned_as_by_diff(left, right):
    command = ["diff", "-t", "-W", "200", "-y", left, right]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    theirs = [
        (row[:98].rstrip(), row[98:101].strip(), row[102:].rstrip())
        for row in done.stdout.splitlines()
    ]
    ours = [
        (old or "", mark.strip(), new or "")
        for _, old, mark, _, new in build.align(left, right)
    ]
    assert ours == [(old, mark, new) for old, mark, new in theirs]


def test_each_link_leads_somewhere_and_tables_are_tables(pages):
    texts = {page: page.read_text() for page in pages.rglob("*.html")}
    ids = {page: re.findall(r' id="?([^" >]+)', texts[page]) for page in texts}
    for page, text in texts.items():
        assert len({*ids[page]}) == len(ids[page])
        assert "|--" not in re.sub(r"<pre.*?</pre>", "", text, flags=re.S), page
        for link in re.findall(r'<[^>]* (?:src|href)="?([^" >]+)', text):
            if not link.startswith("https://"):
                path, _, anchor = link.partition("#")
                target = (page.parent / path).resolve() if path else page
                assert target.is_file(), f"{page}: {link}"
                assert not anchor or anchor in ids[target], f"{page}: {link}"


def test_the_pages_need_no_network(pages):
    files = [file for file in pages.rglob("*") if file.suffix in (".html", ".css")]
    for file in files:
        loaded = re.search(r"(src=|<link|url\(|@import).{0,30}//", file.read_text())
        assert not loaded, file


def test_the_list_of_pairs_leads_to_each(pages):
    links = re.findall('href="../(.*?)"', (pages / "docs/PAIRS.html").read_text())
    assert {*build.pairs().values()} <= {*links}


def words(token, file):
    """Return the text of a question or an answer as in read_page()."""
    html = build.Renderer(file, "").html(token["children"])
    return "".join(unescape(re.sub("<.*?>", "", html)).split())


def read_page(page):
    return "".join(unescape(re.sub("<.*?>", "", page.read_text())).split())


@pytest.mark.parametrize("folder", build.lessons())
def test_answers_are_below_their_questions_and_not_on_the_sheet(folder, pages):
    source = f"{folder}/ANSWERS.md"
    found = build.numbered(build.parse(source))
    answers = {(heading, n): words(item, source) for heading, n, item in found}
    sheet = read_page(pages / folder / "questions.html")
    for file in build.texts(folder):
        shown = read_page(pages / build.address(file))
        for heading, n, item in build.numbered(build.parse(file)):
            answer = answers.pop((heading, n))
            assert f"{words(item, file)}Answer{answer}" in shown
            assert words(item, file) in sheet and answer not in sheet
    assert not answers


def test_a_pair_has_the_questions_about_it(pages):
    for (left, right), page in build.pairs().items():
        text = (pages / page).read_text()
        if right.startswith("clinic"):  # one question for each patient
            number = re.search(r"\d+", right)[0]
            assert re.findall(r"<li value=(\d+)", text) == [number]
        command = f"diff -W 180 -y {os.path.relpath(left, 'dp_ddp_intro')} "
        for section in re.split("^## ", BEYOND, flags=re.M):
            if command + os.path.relpath(right, "dp_ddp_intro") + " " in section:
                assert f"#{build.anchor(section.splitlines()[0])}" in text


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
    tab.open(build.pairs()[LEFT, RIGHT])
    yield tab
    tab.close()
    assert not messages


def press(tab, *keys):
    for key in keys:
        tab.keyboard.press(key)


def seen(tab, what):
    return [one for one in tab.locator(what).all() if one.is_visible()]


def check(tab):
    """Let axe look for what a reader who cannot see, or has no mouse, would miss."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    found = axe.run(tab, options={"preload": False})
    assert not found.violations_count, found.generate_report()


@pytest.mark.slow
@each_pair
def test_each_pair_opens_and_is_accessible(left, right, tab):
    tab.open(build.pairs()[left, right])
    press(tab, "n")
    assert len(seen(tab, ".why")) == 1 and seen(tab, ".why")[0].inner_text()
    assert tab.evaluate("document.body.scrollWidth") <= 1280
    check(tab)


@pytest.mark.slow
def test_each_page_fits_a_phone(tab, pages):
    tab.set_viewport_size({"width": 390, "height": 844})
    for page in pages.rglob("*.html"):
        tab.open(page)
        assert tab.evaluate("document.documentElement.scrollWidth") <= 390, page


@pytest.mark.slow
@pytest.mark.parametrize("page", ["index", "cinic_lab/index", "clinic/questions"])
def test_texts_are_accessible(page, tab):
    tab.open(f"{page}.html")
    for summary in tab.locator("summary").all():
        summary.click()
    check(tab)


def test_an_answer_is_shown_when_it_is_asked_for(tab):
    tab.open("exercise8/index.html")
    answer = tab.locator("details").first
    text = answer.locator("> :not(summary)").first
    assert not text.is_visible()
    answer.locator("summary").click()
    assert text.is_visible()


@pytest.mark.slow
def test_changes_are_chosen_by_keys_by_mouse_and_by_address(tab):
    number = len(new_rows(LEFT, RIGHT))
    assert not seen(tab, ".why") and len(seen(tab, ".row")) == number
    visited = []
    for _ in range(number + 1):  # the last one stays
        press(tab, "n")
        visited.append(tab.url)
        (why,) = seen(tab, ".why")
        focus = tab.evaluate(
            "document.activeElement.getAttribute('aria-describedby')"
        )
        assert why.locator("td").get_attribute("id") == focus
    assert len({*visited}) == number
    press(tab, "p")
    assert tab.url == visited[-3]
    tab.goto(visited[4])
    assert "only on the right" in tab.locator(".row:target a").get_attribute(
        "aria-label"
    )
    assert tab.locator(".row:target").bounding_box()["y"] < 720
    tab.locator(".row .c1").last.click()
    assert tab.url == visited[-1]


@pytest.mark.slow
def test_equal_rows_are_folded(tab):
    folded = tab.locator(".fold").count()
    assert folded and not seen(tab, ".fold")
    tab.get_by_role("button", name="Show").first.click()
    assert len(seen(tab, ".fold")) == 1
    press(tab, "f")
    assert len(seen(tab, ".fold")) == folded
    press(tab, "f")
    assert not seen(tab, ".fold")
    row = tab.locator(".fold tr").first.get_attribute("id")
    address = f"{tab.url}#{row}"
    tab.goto("about:blank")
    tab.goto(address)
    assert len(seen(tab, ".fold")) == 1


@pytest.mark.slow
def test_slides_show_one_change_as_large_as_it_can_be(tab):
    rows = tab.locator(".row")
    press(tab, "s")
    for number in (1, 2):
        assert tab.locator("#place").inner_text().startswith(f"change {number} of")
        (shown,) = [row for row in rows.all() if row.get_attribute("id") in tab.url]
        assert shown.is_visible() and not rows.last.is_visible()
        assert tab.evaluate("document.documentElement.scrollHeight") <= 720
        press(tab, "PageDown")
    check(tab)
    press(tab, "Escape")
    assert rows.last.is_visible()


@pytest.mark.slow
def test_what_is_chosen_is_kept_on_the_next_page(tab, pages):
    order = [(pages / page).as_uri() for page in build.pairs().values()]
    dark = "getComputedStyle(document.body).backgroundColor"
    was = tab.evaluate(dark)
    press(tab, "d")
    now = tab.evaluate(dark)
    assert now != was
    check(tab)
    here = order.index(tab.url)
    with tab.expect_navigation():
        press(tab, ".")
    assert tab.url == order[(here + 1) % len(order)]
    assert tab.evaluate(dark) == now


def test_on_a_phone_changes_are_inline(tab):
    tab.set_viewport_size({"width": 390, "height": 844})
    press(tab, "n", "n", "n", "n")
    changed = tab.locator(".row", has=tab.locator("[aria-label*=changed]")).first
    old, new = (changed.locator("td").nth(n).bounding_box() for n in (1, 4))
    assert old["x"] == new["x"] and old["y"] < new["y"]
    assert tab.evaluate("document.body.scrollWidth") <= 390


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


def test_without_scripts_all_rows_are_there(chromium, pages):
    tab = chromium.new_page(java_script_enabled=False)
    tab.goto((pages / build.pairs()[LEFT, RIGHT]).as_uri())
    assert seen(tab, ".fold") and not seen(tab, "button")
    tab.close()
