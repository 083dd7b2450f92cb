"""Draws requeue.png: how a job is stopped, and goes on. python img/requeue.py"""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

LANES = {
    "Slurm": 0,
    "run-requeue.sh": 1,
    "srun, torchrun": 2,
    "rank 0": 3,
    "rank 1": 4,
}
LANES["checkpoint"] = 5
# from, to, text; where both are the same it is something that one does alone
STEPS = [
    ("Slurm", "run-requeue.sh", "start"),
    ("run-requeue.sh", "srun, torchrun", "launch"),
    ("srun, torchrun", "rank 1", "start the ranks"),
    ("rank 0", "rank 1", "train, batch by batch"),
    ("Slurm", "run-requeue.sh", "USR1: 120 s left"),
    ("run-requeue.sh", "srun, torchrun", "USR1"),
    ("srun, torchrun", "rank 1", "USR1, maybe to one rank first"),
    ("rank 0", "rank 1", "all_reduce: who was told?"),
    ("rank 1", "rank 0", "its random state"),
    ("rank 0", "checkpoint", "weights, place in the epoch"),
    ("rank 1", "srun, torchrun", "both leave with status 85"),
    ("srun, torchrun", "run-requeue.sh", "85"),
    ("run-requeue.sh", "Slurm", "scontrol requeue"),
    ("Slurm", "run-requeue.sh", "start again, same job"),
    ("run-requeue.sh", "srun, torchrun", "launch"),
    ("srun, torchrun", "rank 1", "start the ranks"),
    ("checkpoint", "rank 0", "--resume, by itself"),
    ("rank 0", "rank 1", "train on the images left"),
]


def main():
    height = len(STEPS) + 1
    plt.figure(figsize=(10, 0.42 * height), dpi=100)
    for name, x in LANES.items():
        plt.plot([x, x], [0.2, height], color="0.75", zorder=0)
        box = {"boxstyle": "round", "facecolor": "0.92", "edgecolor": "0.6"}
        plt.text(x, -0.3, name, ha="center", fontsize=11, bbox=box)
    for y, (one, other, text) in enumerate(STEPS, start=1):
        stopping = 5 <= y <= 13
        color = "tab:red" if stopping else "tab:blue"
        start, end = LANES[one], LANES[other]
        style = "<->" if text.startswith(("train", "all_reduce")) else "->"
        arrow = {"arrowstyle": style, "color": color, "linewidth": 1.5}
        plt.annotate("", (end, y), (start, y), arrowprops=arrow)
        white = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}
        middle = (start + end) / 2
        plt.text(middle, y - 0.15, text, ha="center", va="bottom", bbox=white)
    plt.gca().invert_yaxis()
    plt.axis("off")
    plt.savefig(Path(__file__).with_suffix(".png"), bbox_inches="tight")


if __name__ == "__main__":
    main()
