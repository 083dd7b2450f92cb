"""The plot of predict.py: predicted speed-ups, their range, and measured ones."""

from matplotlib.figure import Figure

from palette import GREY, INDIGO, ROSE


def draw_scaling(axes, rows, measured):
    """Draw the speed-ups of predict.py's rows relative to the first, on one GPU."""
    gpus = [row.gpus for row in rows]
    one = rows[0].step.seconds / rows[0].batch  # seconds per image

    def speedups(steps):
        return [
            one * row.batch / s.seconds for row, s in zip(rows, steps, strict=True)
        ]

    low = speedups([row.worst for row in rows])
    high = speedups([row.best for row in rows])
    axes.plot(gpus, gpus, "--", color=GREY, label="ideal")
    axes.fill_between(gpus, low, high, color=INDIGO, alpha=0.2, label="range")
    predicted = speedups([row.step for row in rows])
    axes.plot(gpus, predicted, ".-", color=INDIGO, label="predicted")
    if measured:
        axes.plot(*zip(*measured, strict=True), "o", color=ROSE, label="measured")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:.0f}")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set(xlabel="GPUs or CPU cores", ylabel="speed-up")
    axes.legend()


def draw_predictions(tables):
    """Return a Figure with a panel for each table.

    tables: {title: (rows of predict.py, [(GPUs, speed-up)] as measured)}
    """
    figure = Figure(figsize=(5.5 * len(tables), 5), layout="constrained")
    panels = figure.subplots(1, len(tables), squeeze=False)[0]
    for axes, (title, (rows, measured)) in zip(panels, tables.items(), strict=True):
        draw_scaling(axes, rows, measured)
        axes.set_title(title.replace(": ", ":\n"), fontsize=11)
    return figure
