"""Writes what compare.py prints as a page: one file, no scripts, for any screen.

Names and options are of others' files: escape() is around each, and the page may
load and run nothing.
"""

import base64
import io
from html import escape
from pathlib import Path

from compare_read import printable, tell_apart

from common.cli import UserError

HEAD = """<!DOCTYPE html>
<html lang="en">
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy"
      content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Runs compared</title>
<style>
:root { color-scheme: light dark; --line: #8886; --band: #8881 }
body { font: 1rem/1.5 system-ui, sans-serif; margin: 0 auto; padding: 1rem;
       max-width: 80rem; color: CanvasText; background: Canvas }
h1 { font-size: 1.5rem } h2 { font-size: 1.2rem; margin-top: 2.5rem }
h1, h2, caption, li { overflow-wrap: anywhere }
.wide { overflow-x: auto; margin: 1.5rem 0 .5rem }
table { border-collapse: collapse; font-size: .9rem;
        font-variant-numeric: tabular-nums }
caption { text-align: left; font-family: ui-monospace, monospace; padding: .3rem 0 }
caption span { display: inline-block; position: sticky; left: 0;
               max-width: min(78rem, 100vw - 2rem) }
th, td { padding: .3rem .6rem; text-align: right; vertical-align: top;
         border-bottom: 1px solid var(--line); max-width: 20rem;
         overflow-wrap: break-word }
thead th { vertical-align: bottom }
tbody tr:nth-child(even) { background: var(--band) }
th:first-child { text-align: left; position: sticky; left: 0; background: Canvas }
ol { margin: 0 0 1rem; font-size: .9rem }
.text td { text-align: left }
img { max-width: 100%; height: auto; background: white; border-radius: .3rem }
@media (max-width: 60rem) {
  th:first-child { min-width: 7rem; max-width: 8rem; overflow-wrap: anywhere }
}
@media print {
  @page { size: A4 landscape; margin: 1cm }
  :root { color-scheme: light } body { max-width: none; padding: 0; font-size: 8pt }
  .wide { overflow: visible } table { font-size: 7pt }
  th, td { padding: .1rem .3rem; max-width: 10rem; overflow-wrap: anywhere }
  tr, img, ol { break-inside: avoid } caption, h2 { break-after: avoid }
  caption span { max-width: none } th:first-child { min-width: 9rem }
}
</style>
"""


def table(caption, lines, kind=""):
    """Return a table: lines of cells, of which the first are its headers."""
    header, *rows = [[escape(cell) for cell in line] for line in lines]
    head = "".join(f'<th scope="col">{cell}</th>' for cell in header)
    body = "\n".join(
        f'<tr><th scope="row">{first}</th>'
        + "".join(f"<td>{cell}</td>" for cell in cells)
        + "</tr>"
        for first, *cells in rows
    )
    caption = escape(caption)  # a region that scrolls can be reached by the keyboard
    return (
        f'<div class="wide" role="region" tabindex="0" aria-label="{caption}">'
        f'<table class="{kind}">\n<caption><span>{caption}</span></caption>\n'
        f"<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody></table></div>\n"
    )


def listed(kind, texts):
    items = "".join(f"<li>{escape(text)}</li>\n" for text in texts)
    return f"<{kind}>\n{items}</{kind}>\n" * bool(texts)


def image(figure):
    """Return a plot as a part of the page, and in words what its lines say."""
    data, (axes,) = io.BytesIO(), figure.axes
    words = [text.get_text() for text in axes.get_legend().get_texts()]
    if words == ["ideal"]:
        return "<p>No plot: no row has a speed-up on more than one GPU.</p>\n"
    figure.savefig(data, format="png", dpi=120, bbox_inches="tight")
    said = escape(
        "Speed-up over the number of GPUs. " + "; ".join(words).replace("\\$", "$")
    )
    source = base64.b64encode(data.getvalue()).decode()
    return f'<p><img alt="{said}" src="data:image/png;base64,{source}"></p>\n'


def find_people(files, runs):
    """Return a row of cells for each file: whose, how many runs, where, the last."""
    rows = []
    for file, who in zip(files, tell_apart(files), strict=True):
        own = [run["copies"][who] for run in runs if who in run["copies"]]
        shared = sum(who in run["copies"] and len(run["copies"]) > 1 for run in runs)
        count = f"{len(own)}, of these also in another file: {shared}"
        machines = "; ".join(dict.fromkeys(run["machine"] for run in own))
        last = str(max(run["end"] for run in own)) if own else ""
        count = count if shared else str(len(own))
        rows.append([who or "runs", printable(file), count, machines, last])
    return rows


def write_page(file, sections, people, left_out):
    """Write the page, or raise UserError.

    sections: for each machine its name, {title: (lines of cells, notes)} and a plot;
    people: lines of cells of who handed in; left_out: texts.
    """
    page = f"{HEAD}<h1>Runs compared</h1>\n"
    for machine, tables, figure in sections:
        page += f"<section>\n<h2>{escape(machine)}</h2>\n"
        for title, (lines, notes) in tables.items():
            page += table(title, lines) + listed("ol", notes)
        page += image(figure) + "</section>\n"
    page += "<section>\n<h2>Handed in</h2>\n"
    header = ["who", "file", "runs", "machines", "the last ended"]
    page += table("Whose runs these are", [header, *people], "text")
    page += listed("ul", left_out) + "</section>\n</html>\n"
    try:
        Path(file).parent.mkdir(parents=True, exist_ok=True)
        Path(file).write_text(page, encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write {file}: {error}") from None
