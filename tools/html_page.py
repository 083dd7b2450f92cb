"""Tables as an HTML page that fits a projector, a phone and a sheet of A4."""

from html import escape
from pathlib import Path

from common.errors import UserError

# For headers that are clear only beside their neighbours.
LONG_NAMES = {"per GPU": "batch per GPU"}
STYLE = """
body { font: 15px/1.4 sans-serif; margin: 1em; color: black; background: white }
h2 { font-size: 1.1em; margin: 1.5em 0 0.3em; overflow-wrap: anywhere }
p, ol { margin: 0.3em 0 }
div { overflow-x: auto }
table { border-collapse: collapse; margin: 0.5em 0 }
th, td { padding: 0.25em 0.6em; border-bottom: 1px solid #aaa; text-align: right;
  vertical-align: top; white-space: nowrap }
th { border-bottom: 2px solid black }
.text { text-align: left }
@page { margin: 12mm }
@media print {
  body { font-size: 9pt; margin: 0 }
  div { overflow: visible }
  th { white-space: normal; overflow-wrap: normal }
  .text { white-space: normal }
  th, td { padding: 0.2em 0.35em }
  h2, p, thead { break-after: avoid }
  tbody { break-inside: avoid }
}
"""


def check_name(name):
    """Return the name of a page to write; else UserError, to spare other files."""
    if not name.endswith((".html", ".htm")):
        raise UserError(
            f"--html {name} is not a page; give a name such as class.html"
        )
    return name


def split_constants(lines):
    """Return the lines without constant columns, and these as text.

    The first column, pairs, speed-ups and notes always stay.
    """
    kept, constant = [], []
    for i, (header, *cells) in enumerate(zip(*lines, strict=True)):
        same = len(cells) > 1 and len({*cells}) == 1
        if i == 0 or header in ("pairs", "speed-up", "note") or not same:
            kept.append(i)
        elif cells[0]:
            constant.append(f"{LONG_NAMES.get(header, header)} {cells[0]}")
    return [[line[i] for i in kept] for line in lines], ", ".join(constant)


def format_line(line, tag, is_text):
    """Return a line of a table. A cell of several lines makes several rows of it."""
    cells = [cell.split("\n") for cell in line]
    height, rows = max(map(len, cells)), ""
    for i in range(height):
        rows += "<tr>"
        for parts, left in zip(cells, is_text, strict=True):
            if i < len(parts):
                style = " class=text" if left else ""
                if len(parts) < height:
                    style += f" rowspan={height}"
                text = escape(parts[i]).replace("_", "_<wbr>")  # wraps in long names
                if tag == "th":
                    text = text.replace("-", "\N{NON-BREAKING HYPHEN}")
                rows += f"<{tag}{style}>{text}</{tag}>"
        rows += "</tr>"
    return rows


def format_table(title, lines, notes):
    """Return a table with its title, its constants above and its notes below."""
    lines, constant = split_constants(lines)
    is_text = [header in ("script", "owner", "pairs") for header in lines[0]]
    parts = [f"<h2>{escape(title)}</h2>"]
    if constant:
        parts.append(f"<p>The same in all lines: {escape(constant)}.</p>")
    header, *lines = lines
    parts.append(f"<div><table><thead>{format_line(header, 'th', is_text)}</thead>")
    for line in lines:
        parts.append(f"<tbody>{format_line(line, 'td', is_text)}</tbody>")
    parts.append("</table></div>")
    if notes:
        items = "".join(f"<li>{escape(note)}</li>" for note in notes)
        parts.append(f"<p>Notes:</p><ol>{items}</ol>")
    return "\n".join(parts)


def write_page(file, tables):
    """Write {title: (lines, notes)} as a page, or raise UserError."""
    sections = [format_table(title, *table) for title, table in tables.items()]
    head = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width">'
    )
    head += f"<title>Speed-ups</title><style>{STYLE}</style>"
    page = f'<!doctype html><html lang="en">{head}<h1>Speed-ups</h1>\n'
    try:
        Path(file).parent.mkdir(parents=True, exist_ok=True)
        Path(file).write_text(page + "\n".join(sections), "utf-8", "replace")
    except OSError as error:
        raise UserError(f"cannot write {file}: {error.strerror}") from None
