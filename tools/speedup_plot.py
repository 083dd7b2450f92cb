"""The plot of compare.py: speed-up and efficiency over the number of GPUs."""

from collections import defaultdict
from textwrap import fill

from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from palette import GREY, SERIES

MAX_LINES = 10  # more cannot be told apart; the table has all
MARKERS = "os"


def has_speedup(row):
    return row["gpus"] > 1 and row["base"]


def collect_lines(groups, describe):
    """Return {name: rows}, with a name for each configuration."""
    lines = defaultdict(list)
    for title, rows in groups.items():
        place = f" ({title})" if len(groups) > 1 else ""
        for row in rows:
            lines[describe(row) + place].append(row)
    return lines


def count_runs(rows):
    """Return how many runs the rows have, in words."""
    counts = {row["runs"] for row in rows} | {row["base"]["runs"] for row in rows}
    if not counts:
        return "no run with a baseline"
    if max(counts) == 1:
        return "one run of each command"
    least = f"{min(counts)} to " if len(counts) > 1 else ""
    return f"each dot is a run, the line their median: {least}{max(counts)} runs"


def draw_line(axes, right, name, rows, colour, marker):
    """Draw the runs of a configuration, their medians and their efficiency.

    Two points are no curve: only three or more are joined.
    """
    base = rows[0]["base"]
    points = {1: 1.0} | {row["gpus"]: row["speedup"] for row in rows}
    for row in (base, *rows):
        one_gpu = base if row is base else row["base"]
        dots = [speed / one_gpu["speed"] for speed in row["speeds"]]
        axes.plot([row["gpus"]] * len(dots), dots, ".", color="black", zorder=3)
    figures = ", ".join(f"{row['speedup']:.2f} on {row['gpus']}" for row in rows)
    solid, dotted = ("-", ":") if len(points) > 2 else ("", "")
    style = {"color": colour, "marker": marker}
    label = fill(f"{name}: {figures}", 70)
    axes.plot(
        *zip(*points.items(), strict=True), linestyle=solid, label=label, **style
    )
    efficiencies = [speedup / gpus for gpus, speedup in points.items()]
    style |= {"markerfacecolor": "white", "alpha": 0.7}
    right.plot([*points], efficiencies, linestyle=dotted, **style)


def draw_speedups(groups, describe):
    """Return the Figure of compare()'s groups. describe: names a row."""
    figure = Figure(figsize=(8, 5.5))
    axes = figure.add_subplot()
    right = axes.twinx()
    groups = {title: [*filter(has_speedup, rows)] for title, rows in groups.items()}
    groups = {title: rows for title, rows in groups.items() if rows}
    lines = collect_lines(groups, describe)
    shown = dict(sorted(lines.items(), key=lambda line: -len(line[1]))[:MAX_LINES])
    for i, (name, rows) in enumerate(shown.items()):
        marker = MARKERS[i // len(SERIES) % len(MARKERS)]
        draw_line(axes, right, name, rows, SERIES[i % len(SERIES)], marker)
    rows = [row for rows in shown.values() for row in rows]
    most = max([row["gpus"] for row in rows], default=1)
    axes.plot([1, most], [1, most], "--", color=GREY, label="ideal")
    axes.set(xlabel="GPUs or CPU cores", ylabel="speed-up (filled)")
    axes.set_ylim(bottom=0)
    axes.set_xticks(sorted({1, most, *(row["gpus"] for row in rows)}))
    right.set(ylabel="efficiency (hollow)", ylim=(0, max(1.1, right.get_ylim()[1])))
    right.yaxis.set_major_formatter(PercentFormatter(1))
    axes.spines.top.set_visible(False)
    right.spines.top.set_visible(False)
    title = "".join(groups) if len(groups) == 1 else "Speed-ups"
    text = f"{fill(title, 75)}\n{count_runs(rows)}"
    if len(lines) > len(shown):
        text += f"; {len(lines) - len(shown)} more lines are in the table"
    axes.set_title(text, fontsize=10)
    axes.legend(fontsize=9, loc="upper left", bbox_to_anchor=(0, -0.12))
    return figure
