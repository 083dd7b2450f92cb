"""Draws a small stand-in for CIFAR-100, in its files' format.

    python sample_data.py [--to FOLDER] [--scale 0.1]

It goes to data/sample in the repository. The same images are drawn every time.
"""

import pickle

import numpy as np

from common.drawing import COLOURS, SHAPES, draw_data_set, draw_shape


def draw_files(folder, scale):
    """Draw 100 classes, shapes in colours, in CIFAR-100's files.

    At scale 1 there are 5,000 images to train and 1,000 to validate on.
    """
    kinds = [(shape, colour) for shape in SHAPES for colour in COLOURS]
    folder.mkdir(parents=True)
    for name, count in {"train": 5000, "test": 1000}.items():
        rng, count = np.random.default_rng(len(name)), round(count * scale)
        labels = rng.permutation(np.arange(count) % 100).tolist()
        images = []
        for label in labels:
            shape, colour = kinds[label]
            image = draw_shape(rng, SHAPES[shape], COLOURS[colour])
            images.append(np.asarray(image).transpose(2, 0, 1).ravel())
        split = {
            "data": np.array(images),
            "fine_labels": labels,
            "coarse_labels": [label // 10 for label in labels],
            "filenames": [f"{name}_{i}.png" for i in range(count)],
        }
        (folder / name).write_bytes(pickle.dumps(split, protocol=2))
    meta = {
        "fine_label_names": [f"{colour}_{shape}" for shape, colour in kinds],
        "coarse_label_names": list(SHAPES),
    }
    (folder / "meta").write_bytes(pickle.dumps(meta, protocol=2))


def main():
    draw_data_set(__doc__, "cifar-100-python", draw_files)


if __name__ == "__main__":
    main()
