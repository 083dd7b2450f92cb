"""Plots a training image of each class: logs/data.png.

python plot_data.py
"""

from pathlib import Path

from torchvision.utils import save_image

from common.errors import run
from dataset import cifar100


def main():
    train_set, _ = cifar100()
    labels = train_set.labels.tolist()
    images = train_set.images[[labels.index(label) for label in range(100)]]
    Path("logs").mkdir(exist_ok=True)
    save_image(images / 255, "logs/data.png", nrow=20)
    print("An image of each class saved to logs/data.png")


if __name__ == "__main__":
    run(main)
