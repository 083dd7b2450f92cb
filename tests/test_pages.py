"""The pages, in which each changed row is explained; questions and their answers."""

import re
import shutil
import subprocess
import sys

import pytest
from conftest import EXERCISES, REPOSITORY

from pairs import PAIRS

sys.path.append(str(REPOSITORY / "docs/pages"))
import build

LEFT, RIGHT = PAIRS[0][:2]
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
    why = build.explain(build.room_of(right))
    for row in new_rows(left, right):
        words = re.sub("<.*?>", "", why(row)).split()
        assert 8 <= len(words) <= 100, f"{row}: {' '.join(words)}"


@pytest.mark.parametrize("file", ROWS, ids=lambda file: file.parent.name)
def test_each_explained_row_is_in_a_script(file):
    room = file.parent.relative_to(REPOSITORY).as_posix()
    pairs = [pair for pair in PAIRS if build.room_of(pair[1]) == room]
    known = {row.strip() for pair in pairs for row in new_rows(*pair[:2])}
    shown = re.findall(r"^ {4}(.+)$", file.read_text(), re.M)
    assert shown and {row.strip() for row in shown} <= known
    assert len({build.comment(row) for row in shown}) == len(shown)


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


def test_the_pages_need_nothing_else(pages):
    for page in pages.iterdir():
        text = page.read_text()
        for link in re.findall(r'(?:src|href)="?([^" >#]+)', text):
            own = link.startswith("../../")  # to a file of the repository
            target = REPOSITORY / link[6:].partition("#")[0] if own else pages / link
            assert target.exists() or link.startswith("https://"), link
        assert not re.search(r"(src=|<link|url\(|@import).{0,30}//", text)


@pytest.fixture(scope="module")
def chromium():
    playwright = pytest.importorskip("playwright.sync_api")
    if not (path := shutil.which("chromium")):
        pytest.skip("no Chromium here: run sudo apt-get install chromium")
    with playwright.sync_playwright() as play:
        yield play.chromium.launch(executable_path=path, args=["--no-sandbox"])


@pytest.fixture
def tab(chromium, pages):
    """Return a tab, on whose console nothing may be said; tab.pair() opens one."""
    tab, said = chromium.new_page(viewport={"width": 1280, "height": 720}), []
    tab.on("console", lambda message: said.append(message.text))
    tab.on("pageerror", lambda error: said.append(str(error)))
    tab.pair = lambda *pair: tab.goto((pages / build.address(pair)).as_uri())
    tab.pair(LEFT, RIGHT)
    yield tab
    tab.close()
    assert not said


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
def test_each_page_opens_and_is_accessible(left, right, tab):
    tab.pair(left, right)
    press(tab, "n")
    assert len(seen(tab, ".why")) == 1 and seen(tab, ".why")[0].inner_text()
    assert tab.evaluate("document.body.scrollWidth") <= 1280
    check(tab)


@pytest.mark.slow
def test_the_index_leads_to_each_pair(tab, pages):
    tab.goto((pages / "index.html").as_uri())
    assert tab.locator("td a").count() == len(PAIRS)
    check(tab)
    tab.locator("td a").first.click()
    assert "Choose one" in tab.locator("header").inner_text()


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
def test_alike_rows_are_folded(tab):
    folded = tab.locator(".fold").count()
    assert folded and not seen(tab, ".fold")
    tab.get_by_text("equal rows").first.click()
    assert len(seen(tab, ".fold")) == 1
    press(tab, "f")
    assert len(seen(tab, ".fold")) == folded
    press(tab, "f")
    assert not seen(tab, ".fold")
    address = tab.url + "#r1"  # of a row within a fold
    tab.goto("about:blank")
    tab.goto(address)
    assert len(seen(tab, ".fold")) == 1


@pytest.mark.slow
def test_slides_show_one_change_as_large_as_it_can_be(tab):
    rows = tab.locator(".row")
    size = "el => parseFloat(getComputedStyle(el).fontSize)"
    before = rows.first.locator("td").last.evaluate(size)
    press(tab, "s")
    for number in (1, 2):
        assert tab.locator("#place").inner_text().startswith(f"change {number} of")
        (shown,) = [row for row in rows.all() if row.get_attribute("id") in tab.url]
        assert shown.is_visible() and not rows.last.is_visible()
        assert shown.locator("td").last.evaluate(size) > 1.5 * before
        assert tab.evaluate("document.documentElement.scrollHeight") <= 720
        focus = tab.evaluate("document.activeElement.hash")
        assert number == 1 or tab.url.endswith(focus)
        press(tab, "PageDown")
    check(tab)
    tab.reload()
    assert tab.evaluate("main.scrollHeight <= main.clientHeight")
    press(tab, "Escape")
    assert rows.last.is_visible()


@pytest.mark.slow
def test_what_is_chosen_is_kept_on_the_next_page(tab, pages):
    order = [
        page.split('"')[0]
        for page in re.findall(
            r"href=([^ >]+after[^ >]+)>", (pages / "index.html").read_text()
        )
    ]
    size = "getComputedStyle(document.querySelector('.pair')).fontSize"
    dark = "getComputedStyle(document.body).backgroundColor"
    was = tab.evaluate(size), tab.evaluate(dark)
    press(tab, "+", "+", "d")
    now = tab.evaluate(size), tab.evaluate(dark)
    assert now[0] != was[0] and now[1] != was[1]
    check(tab)
    here = order.index(tab.url.rpartition("/")[2])
    with tab.expect_navigation():
        press(tab, ".")
    assert tab.url.endswith(order[(here + 1) % len(order)])
    assert tab.evaluate(dark) == now[1]
    with tab.expect_navigation():
        press(tab, ",")
    assert tab.url.endswith(order[here])
    press(tab, "-", "-", "d")
    assert (tab.evaluate(size), tab.evaluate(dark)) == was


@pytest.mark.parametrize("width", [390, 800, 1024])
def test_on_a_phone_changes_are_inline(width, tab):
    tab.set_viewport_size({"width": width, "height": 844})
    press(tab, "n", "n", "n", "n")
    changed = tab.locator(".row", has=tab.locator("[aria-label*=changed]")).first
    old, new = (changed.locator("td").nth(n).bounding_box() for n in (1, 4))
    assert old["x"] == new["x"] and old["y"] < new["y"]
    assert tab.evaluate("document.body.scrollWidth") <= width
    check(tab)


@pytest.mark.parametrize("side", [1, 4])
def test_one_side_is_copied(side, tab):
    cells = tab.locator(f".near td:nth-child({side + 1})")
    cells.nth(0).hover(position={"x": 1, "y": 5})
    tab.mouse.down()
    cells.nth(2).hover()  # beyond its text
    tab.mouse.up()
    copied = tab.evaluate("String(getSelection())").split("\n")
    assert [*filter(str.strip, copied)] == ["import time", "import torch"]


@pytest.mark.slow
def test_on_paper(tab):
    tab.emulate_media(media="print", color_scheme="dark")
    assert len(seen(tab, ".why")) > 12 and not seen(tab, "[role=toolbar]")
    assert (
        len(seen(tab, ".opens")) == tab.locator(".fold").count()
    )  # what is left out
    assert tab.evaluate("getComputedStyle(document.body).backgroundColor") == (
        "rgb(255, 255, 255)"
    )


def test_without_scripts_all_rows_are_there(chromium, pages):
    tab = chromium.new_page(java_script_enabled=False)
    tab.goto((pages / build.address((LEFT, RIGHT))).as_uri())
    assert seen(tab, ".fold") and not seen(tab, "button")
    tab.close()


def read_questions(text):
    """Return ({heading: numbers of its items}, lines of no item and no code).

    A question, or a thing to try, is an item of a numbered list.
    """
    items, rest, heading, in_item = {}, [], "", False
    for line in text.splitlines():
        if found := re.match(r"#+ (.*)", line):
            heading, in_item = found[1], False
        elif found := re.match(r"(\d+)\. ", line):
            items.setdefault(heading, []).append(int(found[1]))
            in_item = True
        elif line and not line.startswith(" "):
            in_item = False
        if not in_item and not line.startswith("    "):
            rest.append(re.sub(r"`[^`]*`|\]\([^)]*\)", "", line))
    return items, "\n".join(rest)


@pytest.mark.parametrize("exercise", [*EXERCISES, "dp_ddp_intro/beyond_ddp"])
def test_each_question_has_an_answer_under_its_number(exercise):
    pages = {*(REPOSITORY / exercise).glob("*.md")}
    pages -= {REPOSITORY / exercise / name for name in ("ANSWERS.md", "ROWS.md")}
    asked, rest = read_questions("\n".join(page.read_text() for page in pages))
    answered, _ = read_questions((REPOSITORY / exercise / "ANSWERS.md").read_text())
    assert asked and asked == answered
    for heading, numbers in asked.items():
        assert numbers == list(range(1, len(numbers) + 1)), heading
    assert not re.search(r"\?|(^|[.:;] )[Tt]ry\b", rest, re.M), rest
