"""The plot of what_fits.py: the memory of a GPU, part by part, for each strategy."""

from matplotlib.figure import Figure

# Paul Tol's colours, which the colour-blind can tell apart.
COLOURS = {
    "weights": "#332288",
    "gradients": "#228833",
    "Adam": "#ddcc77",
    "copies": "#cc6677",
    "logits": "#aaaaaa",
    "activations": "#88ccee",
}
SHOWN = 2  # times the memory that is usable: longer bars are cut


def draw_bars(axes, rows, usable):
    """Draw a bar for each strategy, whose parts are stacked, and its total in GB."""
    rows = {name: parts for name, parts in rows.items() if parts}
    totals = dict.fromkeys(rows, 0.0)
    for part, colour in COLOURS.items():
        sizes = {name: parts[part] / 1e9 for name, parts in rows.items()}
        axes.barh([*rows], [*sizes.values()], left=[*totals.values()], color=colour)
        totals = {name: totals[name] + size for name, size in sizes.items()}
    beside = axes.get_yaxis_transform()  # x from 0 to 1 is the width of the panel
    for name, total in totals.items():
        text = f"{total:.2f}" if total < 10 else f"{total:.0f}"
        axes.text(1.02, name, text, transform=beside, va="center")
    axes.axvline(usable, color="black", linestyle="--")
    axes.set_xlim(0, SHOWN * usable)
    axes.invert_yaxis()  # the first strategy above


def draw_memory(models, usable):
    """Return a Figure with a panel for each model and each number of GPUs.

    models: {name: {GPUs: {strategy: {part: bytes per GPU} or None}}}; usable: the
    memory of a GPU that they may take, in GB.
    """
    columns = max(len(panels) for panels in models.values())
    size = 2 + 4.5 * columns, 1.5 + 2.6 * len(models)
    figure = Figure(figsize=size, layout="constrained")
    grid = figure.subplots(len(models), columns, squeeze=False)
    for line, (name, panels) in zip(grid, models.items(), strict=True):
        for axes, (gpus, rows) in zip(line, panels.items(), strict=True):
            draw_bars(axes, rows, usable)
            axes.set_title(f"{name}, {gpus} GPUs", fontsize=11)
    figure.supxlabel(
        "GB per GPU, all activations stored\n"
        f"dashed: the {usable:g} GB that they may take; right: the total",
        fontsize=11,
    )
    bars = [bar.patches[0] for bar in grid[0][0].containers]
    figure.legend(bars, COLOURS, loc="outside upper center", ncols=3)
    return figure
