"""The site: pages of texts and pairs; questions, their answers, explained lines."""

import os
import re
import shutil
import subprocess
import sys
from html import unescape
from html.parser import HTMLParser

import pytest
from conftest import REPOSITORY

sys.path.append(str(REPOSITORY / "docs/pages"))
import build
import pair
import texts
from texts import LESSONS, PAGES

LEFT, RIGHT = "dp_ddp_intro/single.py", "dp_ddp_intro/ddp.py"
EIGHT = "exercise8/pytorch_dvc_cnn_pretrained"
MEASURED = [
    (LEFT, RIGHT),
    (f"{EIGHT}.py", f"{EIGHT}_multigpu.py"),
    ("mnist_multigpu/mnist_singlegpu.py", "mnist_multigpu/mnist_ddp.py"),
    ("cifar100_demo/train_cifar100.py", "cifar100_demo/train_ddp_cifar100.py"),
    ("cinic_lab/cinic_tensorboard.py", "cinic_lab/cinic_ddp.py"),
]
each_pair = pytest.mark.parametrize("left, right", PAGES)


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """Return a folder with the pages."""
    folder = tmp_path_factory.mktemp("pages") / "pages"
    build.build(folder)
    return folder


def test_descriptions_of_scripts_hold_their_quotes(pages):
    found = {}
    parser = HTMLParser()
    parser.handle_starttag = lambda tag, attrs: found.setdefault(tag, []).append(
        attrs
    )
    parser.feed((pages / "dp_ddp_intro/plain_ddp.py.html").read_text())
    (description,) = [
        dict(attrs)["content"]
        for attrs in found["meta"]
        if ("name", "description") in attrs
    ]
    assert '. """DDP with noth' in description


def new_rows(left, right):
    """Return the changed lines; of one that the right script lacks, the left one."""
    rows = pair.align(left, right)
    return [
        old if new is None else new for _, old, mark, _, new in rows if mark != " "
    ]


def read_changes(html):
    """Return {name: (its rows, the words of its explanation)} of a pair's table."""
    found = {}
    for name, body in re.findall(
        r'<tbody id="(.*?)" class=change>(.*?)(?=<tbody|\Z)', html, re.S
    ):
        rows, _, why = body.partition("<tr class=why>")
        found[name] = (
            rows.split("<tr class=row>")[1:],
            re.sub("<.*?>", "", why).split(),
        )
    return found


@each_pair
def test_each_change_is_explained(left, right):
    html, number = pair.table(left, right)
    changes = read_changes(html)
    assert len(changes) == number and all(changes)  # a bracket alone has no name
    rows = sum(len(rows) for rows, _ in changes.values())
    assert rows == len(new_rows(left, right))
    assert rows + html.count("<tr id=r") == len(pair.align(left, right))
    for name, (_, words) in changes.items():
        assert 8 <= len(words) <= 130, f"{name}: {' '.join(words)}"


@pytest.mark.parametrize("left, right", MEASURED)
def test_what_happens_without_a_ddp_line_is_shown_first(left, right):
    for name, (_, words) in read_changes(pair.table(left, right)[0]).items():
        if name != "the-docstring-s-first-line":
            assert words[:2] == ["Without", "it:"], name


def test_a_comment_and_its_statement_are_one_change():
    changes = read_changes(pair.table(LEFT, RIGHT)[0])
    rows, _ = changes["train-with-the-wrapper-which-averages-gradients"]
    assert [text.count("train_metrics") for text in rows] == [
        0,
        2,
    ]  # it faces its own


def test_a_bracket_belongs_to_the_change_before_it(tmp_path, monkeypatch):
    (tmp_path / "left.py").write_text("first\nlast\n")
    (tmp_path / "right.py").write_text(
        "first\nall = [  # DDP: many\n    1,\n]\nlast\n"
    )
    monkeypatch.setattr(pair, "REPOSITORY", tmp_path)
    monkeypatch.setattr(pair, "colours", lambda file: (tmp_path / file).read_text())
    monkeypatch.setattr(pair, "explain", lambda row, _: (row.strip()[:3], "x.md"))
    html, number = pair.table("left.py", "right.py")
    assert [len(rows) for rows, _ in read_changes(html).values()] == [1, 2]
    assert number == 2


def test_the_words_that_differ_are_marked():
    html, _ = pair.table(
        "mnist_multigpu/mnist_singlegpu.py", "mnist_multigpu/mnist_ddp.py"
    )
    rows, _ = read_changes(html)["each-rank-has-its-own-random-numbers"]
    marked = "".join(re.findall("<b>(.*?)</b>", rows[0]))
    assert re.sub("<.*?>", "", marked) == " + rank"


@pytest.mark.parametrize("folder", LESSONS)
def test_each_explained_row_is_in_a_script(folder):
    own = [scripts for scripts in PAGES if scripts[1].startswith(f"{folder}/")]
    known = {row.strip() for scripts in own for row in new_rows(*scripts)}
    text = (REPOSITORY / folder / "ROWS.md").read_text()
    shown = [row.strip() for row in re.findall(r"^ {4}(.+)$", text, re.M)]
    assert shown and {*shown} <= known
    assert len({pair.comment(row) for row in shown}) == len(shown)


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


def test_each_link_leads_somewhere_without_a_network(pages):
    shown = {page: page.read_text() for page in pages.rglob("*.html")}
    ids = {
        page: re.findall(r' id="?([^" >]+)', text) for page, text in shown.items()
    }
    for page, text in shown.items():
        assert len({*ids[page]}) == len(ids[page])
        assert "|--" not in re.sub(r"<pre.*?</pre>", "", text, flags=re.S), page
        linked = r'<(\w+)[^>]* (?:src|srcset|href)="?([^" >]+)'
        for tag, link in re.findall(linked, text):
            if not (tag == "a" and link.startswith("https://")):
                path, _, anchor = link.partition("#")
                target = (page.parent / path).resolve() if path else page
                assert target.is_file(), f"{page}: {link}"
                assert not anchor or anchor in ids[target], f"{page}: {link}"


def test_tabs_say_which_pair_and_which_lesson(pages):
    titles = {}
    for page in pages.rglob("*.html"):
        text = page.read_text()
        assert len(text) < 400_000, page  # what a slow network loads
        title = unescape(re.search("<title>(.*?)</title>", text)[1])
        titles.setdefault(title, []).append(page)
        assert re.search('<meta name="description" content=".{20,}">', text), page
    assert not [pages for pages in titles.values() if len(pages) > 1]
    assert {"One GPU → DDP: Exercise 8", "Questions: Exercise 8"} <= {*titles}


def test_a_published_site_links_to_its_repository(tmp_path, monkeypatch):
    monkeypatch.setenv("GITHUB_SERVER_URL", "https://github.example")
    monkeypatch.setenv("GITHUB_REPOSITORY", "me/course")
    assert build.repository_address() == "https://github.example/me/course"
    monkeypatch.delenv("GITHUB_REPOSITORY")
    monkeypatch.setattr(build, "REPOSITORY", tmp_path)
    remote = "https://me:token@gitlab.example/me/course.git"
    for command in ("init", "--quiet"), ("remote", "add", "origin", remote):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    assert build.repository_address() == "https://gitlab.example/me/course"


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
    (_, number), visited = pair.table(LEFT, RIGHT), []
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
    assert tab.locator(":target .row").first.bounding_box()["y"] < 720
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
    rows, number = tab.locator(".row"), pair.table(LEFT, RIGHT)[1]
    tab.key("s")
    for n in range(1, number + 1):
        assert (
            tab.locator("#place").inner_text().startswith(f"change {n} of {number}")
        )
        assert tab.locator(":target .row").first.is_visible()
        assert rows.last.is_visible() == (n == number)
        assert tab.evaluate("document.documentElement.scrollHeight") <= 720
        code = tab.locator(":target .row td:nth-child(5)").first
        assert code.evaluate("e => parseFloat(getComputedStyle(e).fontSize)") >= 18
        tab.key("PageDown")
    check(tab)
    tab.key("Escape")
    assert rows.first.is_visible()


def sides(tab):
    """Return the boxes of the first changed line on both sides."""
    row = tab.locator(".row", has=tab.locator("[aria-label*=changed]")).first
    return [row.locator("td").nth(n).bounding_box() for n in (1, 4)]


@pytest.mark.parametrize("width", [1024, 1366, 1920])
def test_both_sides_stay_side_by_side_in_large_type(width, tab):
    tab.set_viewport_size({"width": width, "height": 800})
    before = sides(tab)
    for _ in range(5):
        tab.key("+")
    after = sides(tab)
    assert after[0]["height"] > before[0]["height"]
    assert (
        after[0]["y"] == after[1]["y"]
        and after[0]["x"] < width / 2 < after[1]["x"] + 9
    )
    assert tab.evaluate("document.documentElement.scrollWidth") <= width


@pytest.mark.parametrize("width, columns", [(1366, 1), (1920, 2)])
def test_a_slide_has_two_columns_where_they_are_legible(width, columns, tab):
    tab.set_viewport_size({"width": width, "height": 800})
    tab.key("s")
    old, new = sides(tab)
    assert (old["x"] == new["x"]) == (columns == 1)


def test_solutions_are_folded(tab):
    tab.open("clinic/index.html")
    solved = tab.locator("nav a[href*='solutions/'], nav a[href*='ROWS']")
    assert solved.count() > 12 and not solved.locator("visible=true").count()
    tab.get_by_text("Solutions", exact=True).click()
    assert solved.first.is_visible()


def test_commands_are_copied(tab):
    tab.context.grant_permissions(["clipboard-read", "clipboard-write"])
    tab.open("exercise8/index.html")
    tab.get_by_role("button", name="Copy").first.click()
    tab.get_by_role("button", name="Copied").wait_for()
    copied = tab.evaluate("navigator.clipboard.readText()")
    assert copied.split("\n")[:2] == ["cd exercise8", "source common/env.sh"]


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
    old, new = sides(tab)
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
