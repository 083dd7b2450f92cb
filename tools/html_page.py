"""A page with a plot and tables, for a projector, a phone and a sheet of A4."""

from html import escape
from io import StringIO
from pathlib import Path

HEAD = """<!doctype html><html lang="en"><title>Speed-ups</title>
<meta charset="utf-8"><meta name="viewport" content="width=device-width">
<style>
:root {
  color-scheme: light dark;
  --paper: light-dark(#fff, #14171c);
  --ink: light-dark(#1b1f24, #e6e8ea);
  --line: light-dark(#d5d9e0, #363c46);
}
body { margin: 1rem; background: var(--paper); color: var(--ink);
  font: 100%/1.5 system-ui, sans-serif }
h1 { font-size: 1.25rem; margin: 0 }
h2 { font-size: 1.05rem; overflow-wrap: anywhere; margin: 1.5rem 0 .3rem }
svg { display: block; width: 100%; max-width: 60rem; height: auto; background: #fff }
div { overflow-x: auto }
table { border-collapse: collapse; font-variant-numeric: tabular-nums }
th, td { padding: .25em .6em; border-bottom: 1px solid var(--line);
  text-align: right; vertical-align: top; white-space: nowrap }
th:first-child, td:first-child { text-align: left }
ol { margin: .3rem 0; padding-left: 1.5em; overflow-wrap: anywhere }
@page { margin: 12mm; size: landscape }
@media print {
  :root { color-scheme: light }
  body { font-size: 8pt; margin: 0 }
  svg { max-width: 17cm }
  th, td { padding: .2em .35em; white-space: normal }
  tr { break-inside: avoid }
}
</style>
<h1>Speed-ups</h1>
"""


def format_line(line, tag):
    """Return a line of a table, whose long names may wrap."""
    cells = [escape(cell).replace("_", "_<wbr>") for cell in line]
    return f"<tr>{''.join(f'<{tag}>{cell}</{tag}>' for cell in cells)}</tr>"


def format_table(title, lines, notes):
    """Return a table with its title above and its notes below."""
    header, *lines = lines
    rows = "\n".join(format_line(line, "td") for line in lines)
    table = f"<thead>{format_line(header, 'th')}</thead><tbody>{rows}</tbody>"
    items = "".join(f"<li>{escape(note)}</li>" for note in notes)
    title = f"<h2>{escape(title)}</h2>"
    return f"{title}\n<div><table>{table}</table></div>\n<ol>{items}</ol>"


def write_page(file, figure, tables):
    """Write a matplotlib figure and {title: (lines, notes)} as a page."""
    picture = StringIO()
    figure.savefig(picture, format="svg", bbox_inches="tight")
    svg = picture.getvalue()
    svg = svg[svg.index("<svg") :]  # without XML's first lines
    sections = [format_table(title, *table) for title, table in tables.items()]
    Path(file).parent.mkdir(parents=True, exist_ok=True)
    Path(file).write_text("\n".join([HEAD + svg, *sections]), "utf-8")
