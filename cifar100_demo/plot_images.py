"""Draws one image of each of the 100 classes.

python plot_images.py [--to FILE.png]
"""

import pickle
from pathlib import Path

from matplotlib.figure import Figure

from common.cli import OptionParser
from common.data import data_dir
from dataset import cifar100


def main():
    parser = OptionParser(__doc__)
    add = parser.add_argument
    add("--to", type=Path, default=Path("logs/images.png"), help="PNG to write")
    args = parser.parse_args()
    train_set, _ = cifar100()
    meta = (data_dir("cifar-100-python") / "meta").read_bytes()
    names = pickle.loads(meta, encoding="latin1")["fine_label_names"]
    figure = Figure(figsize=(12, 13.5), layout="constrained")
    labels = train_set.labels.tolist()
    for label, axes in enumerate(figure.subplots(10, 10).flat):
        image = train_set.images[labels.index(label)]
        axes.imshow(image.permute(1, 2, 0).numpy())
        axes.set_title(names[label].replace("_", " "), fontsize=8)
        axes.axis("off")
    args.to.parent.mkdir(exist_ok=True)
    figure.savefig(args.to, dpi=80)
    print(f"Saved {args.to}")


if __name__ == "__main__":
    main()
