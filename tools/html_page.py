"""Tables as an HTML page that fits a projector, a phone and a sheet of A4."""

from html import escape
from pathlib import Path

HEAD = """<!doctype html><html lang="en"><title>Speed-ups</title>
<meta charset="utf-8"><meta name="viewport" content="width=device-width">
<style>
body { font: 15px/1.4 sans-serif; margin: 1em }
h2 { font-size: 1.1em; overflow-wrap: anywhere }
div { overflow-x: auto }
table { border-collapse: collapse }
th, td { padding: 0.25em 0.6em; border-bottom: 1px solid #aaa; text-align: right;
  vertical-align: top; white-space: nowrap }
@page { margin: 12mm; size: landscape }
@media print {
  body { font-size: 8pt; margin: 0 }
  th, td { padding: 0.2em 0.35em; white-space: normal }
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


def write_page(file, tables):
    """Write {title: (lines, notes)} as a page."""
    sections = [format_table(title, *table) for title, table in tables.items()]
    Path(file).parent.mkdir(parents=True, exist_ok=True)
    Path(file).write_text(HEAD + "\n".join(sections), "utf-8")
