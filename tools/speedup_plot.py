"""The plot of compare.py: the speed of each command, and the ideal as an outline."""

from textwrap import fill

from matplotlib.figure import Figure

from palette import GREY, INDIGO
from results import name_processors

MAX_BARS = 20  # more make a long picture; the table has all


def has_speedup(row):
    return row["gpus"] > 1 and row["base"]


def pick_rows(groups):
    """Return {title: rows} of groups with a speed-up, and how many do not fit."""
    picked, more = {}, 0
    for title, rows in groups.items():
        if any(map(has_speedup, rows)):
            rows = [row for row in rows if row["base"]]
            room = MAX_BARS - sum(map(len, picked.values()))
            more += len(rows[room:])
            if rows[:room]:
                picked[title] = rows[:room]
    return picked, more


def draw_bars(axes, title, rows, describe):
    """Draw a bar for each row, its ideal as an outline, and a dot for each run."""
    places = range(len(rows))
    speeds = [row["speed"] for row in rows]
    ideals = [row["base"]["speed"] * row["gpus"] for row in rows]
    axes.barh(places, speeds, 0.5, color=INDIGO)
    style = {"fill": False, "edgecolor": GREY, "linestyle": "--", "linewidth": 1.5}
    axes.barh(places, ideals, 0.5, **style)
    for y, row in enumerate(rows):
        speed = f"{row['speed']:.1f} {row['unit']}/s, speed-up {row['speedup']:.2f}"
        text = f"{describe(row)}, {name_processors(row)}: {speed}"
        axes.text(0, y - 0.3, text, fontsize=9, verticalalignment="bottom")
        if row["runs"] > 1:
            axes.plot(row["speeds"], [y] * row["runs"], ".", color=GREY)
    axes.set_ylim(len(rows) - 0.5, -0.7)
    axes.set_yticks([])
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel(f"{rows[0]['unit']} per second; dashed: the ideal")
    axes.set_title(fill(title, 90), fontsize=10, loc="left")


def draw_speedups(groups, describe):
    """Return the Figure of compare()'s groups. describe: names a row."""
    picked, more = pick_rows(groups)
    heights = [len(rows) + 1.6 for rows in picked.values()]
    figure = Figure(figsize=(8.3, 0.3 + 0.55 * sum(heights)), layout="constrained")
    if not picked:
        figure.suptitle("No run on several GPUs has a baseline", fontsize=10)
        return figure
    all_axes = figure.subplots(len(picked), height_ratios=heights, squeeze=False)
    for axes, (title, rows) in zip(all_axes.flat, picked.items(), strict=True):
        draw_bars(axes, title, rows, describe)
    if more:
        figure.suptitle(f"{more} more commands are in the table", fontsize=10)
    return figure
