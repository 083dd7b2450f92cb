"""Sphinx's configuration for the site, whose source is the repository's root.

make pages
"""

import os
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]
import pages  # noqa: E402, the extension

project = "Multi-GPU training in PyTorch"
extensions = ["myst_parser", "sphinx_copybutton", "pages"]
# Scripts become Markdown when they are read, so that Sphinx takes them as texts.
source_suffix = {".md": "markdown", ".py": "markdown", ".sh": "markdown"}
include_patterns = sorted(pages.SOURCES)
exclude_patterns = pages.LEFT_OUT
myst_enable_extensions = ["attrs_block", "attrs_inline"]
myst_heading_anchors = 4  # as on GitHub
highlight_language = "text"
copybutton_selector = "div:not(.highlight-text) > div.highlight pre"

html_theme = "furo"
html_title = project
html_favicon = "static/favicon.svg"
html_static_path = ["static"]
stacked = {"id": "stacked", "media": "(max-width: 699.9px), print"}
html_css_files = ["site.css", ("stacked.css", stacked)]
html_theme_options = {"top_of_page_buttons": []}
if repository := os.environ.get("GITHUB_REPOSITORY"):
    link = {"name": "Repository", "html": "Repository", "class": ""}
    link["url"] = f"{os.environ['GITHUB_SERVER_URL']}/{repository}"
    html_theme_options["footer_icons"] = [link]
html_js_files = [("site.js", {"defer": "defer"})]
html_search_scorer = str(HERE / "scorer.js")
html_copy_source = html_show_sphinx = html_show_copyright = False
