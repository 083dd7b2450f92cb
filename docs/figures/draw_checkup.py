"""The report of ddp-checkup on its example, as on a terminal.

python docs/figures/draw_checkup.py
"""

import os
import subprocess
import sys

from matplotlib.figure import Figure

from figure_utils import REPOSITORY, save

FOLDER = REPOSITORY / "tools" / "checkup"
COLOURS = {"error": "#b00020", "ok": "#1b6e2c"}
LINE, CHARACTER = 0.2, 0.0835  # in inches, at this size of text


def main():
    command = [sys.executable, FOLDER, "-n2", "example.py"]
    env = os.environ | {"CUDA_VISIBLE_DEVICES": "-1"}
    done = subprocess.run(
        command, cwd=FOLDER, env=env, capture_output=True, text=True
    )
    lines = ["$ ddp-checkup -n 2 example.py", *done.stdout.splitlines()]
    width, height = max(map(len, lines)) * CHARACTER + 0.3, len(lines) * LINE + 0.2
    axes = Figure(figsize=(width, height)).add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, width), ylim=(height, 0))
    axes.axis("off")
    for i, line in enumerate(lines):
        state = line.split()[0] if line.startswith("  ") else ""
        style = {"color": COLOURS.get(state, "black")}
        if state == "error" or line.startswith(" " * 12):
            style = {"color": COLOURS["error"], "weight": "bold"}
        axes.text(0.15, (i + 1) * LINE, line, family="monospace", size=10, **style)
    save(axes.figure, "tools/checkup/report.png")


if __name__ == "__main__":
    main()
