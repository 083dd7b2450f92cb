"""Plots a training image of each class, with the class's number: logs/data.png.

python plot_data.py
"""

from pathlib import Path

from matplotlib.figure import Figure

from common.errors import run
from dataset import cifar100

ROWS, COLUMNS = 5, 20
GREY = "#787878"  # can be read on white and on black: the PNG has no background


def main():
    train_set, _ = cifar100()
    labels = train_set.labels.tolist()
    figure = Figure(figsize=(8.3, 3.1), layout="constrained")
    figure.get_layout_engine().set(w_pad=0.01, h_pad=0.04, wspace=0, hspace=0)
    for label, axes in enumerate(figure.subplots(ROWS, COLUMNS).flat):
        image = train_set.images[labels.index(label)]
        axes.imshow(image.permute(1, 2, 0).numpy())
        axes.set_xlabel(label, fontsize=9, labelpad=2, color=GREY)
        axes.set(xticks=[], yticks=[])
        axes.spines[:].set_visible(False)
    Path("logs").mkdir(exist_ok=True)
    figure.savefig("logs/data.png", dpi=100, transparent=True)
    print("An image of each class saved to logs/data.png")


if __name__ == "__main__":
    run(main)
