"""Pictures of a pair's page for README.md, light and dark: docs/img/diff*.png.

    python docs/figures/screenshot_pair.py

It needs Chromium (sudo apt-get install chromium) and what docs/pages/ needs. The
pictures show one change with its explanation, as wide as GitHub shows a README.
"""

import argparse
import shutil
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright

from figure_utils import REPOSITORY

sys.path.append(str(REPOSITORY / "docs/pages"))
from build import build
from texts import PAGES

PAGE = PAGES["dp_ddp_intro/single.py", "dp_ddp_intro/ddp.py"]
CHANGE = "copies-rank-0-s-weights-averages-gradients"
ABOVE, BELOW = 2, 4  # lines beside the change
WIDTH, SCALE = 830, 2  # pixels of a README on GitHub, and of a sharp screen
# Only the change and the lines beside it are left.
CROP = """([change, above, below]) => {
  const lines = [...document.querySelectorAll(".pair tbody tr:not(.why)")];
  const own = [...document.getElementById(change).querySelectorAll(".row")];
  const first = lines.indexOf(own[0]) - above;
  const last = lines.indexOf(own.at(-1)) + below;
  lines.forEach((line, n) => { line.hidden = n < first || n > last; });
  document.querySelector("header").remove();
}"""


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--to", type=Path, default=REPOSITORY / "docs/img")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as play:
        build(Path(folder) / "pages")
        address = (Path(folder) / "pages" / PAGE).as_uri() + f"#{CHANGE}"
        path = shutil.which("chromium")
        browser = play.chromium.launch(executable_path=path, args=["--no-sandbox"])
        for scheme, name in (("light", "diff.png"), ("dark", "diff-dark.png")):
            tab = browser.new_page(
                viewport={"width": WIDTH, "height": 800},
                device_scale_factor=SCALE,
                color_scheme=scheme,
            )
            tab.goto(address)
            tab.evaluate(CROP, [CHANGE, ABOVE, BELOW])
            tab.locator(".pair").screenshot(path=args.to / name)
            print(f"Saved {name}")


if __name__ == "__main__":
    main()
