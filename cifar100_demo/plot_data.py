"""Plots a training image of each class: logs/data.png.

python plot_data.py
"""

from pathlib import Path

from matplotlib.figure import Figure
from torchvision.utils import make_grid

from common.errors import run
from dataset import cifar100

COLUMNS = 20


def main():
    train_set, _ = cifar100()
    labels = train_set.labels.tolist()
    images = train_set.images[[labels.index(label) for label in range(100)]]
    axes = Figure(figsize=(8.3, 2.7), layout="constrained").add_subplot()
    axes.imshow(make_grid(images, nrow=COLUMNS, pad_value=255).permute(1, 2, 0))
    side = images.shape[-1] + 2  # pixels from one image to the next
    centres = [side * n + side / 2 for n in range(COLUMNS)]
    axes.set_xticks(centres, range(COLUMNS))
    axes.set_yticks(centres[: 100 // COLUMNS], range(0, 100, COLUMNS))
    axes.set_xlabel("class: the row's number plus the column's")
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    Path("logs").mkdir(exist_ok=True)
    axes.figure.savefig("logs/data.png", dpi=100)
    print("An image of each class saved to logs/data.png")


if __name__ == "__main__":
    run(main)
