"""MirroredStrategy: one TensorFlow process for all GPUs of a node.

    sbatch --gpus-per-node=1 jobscript_tensorflow.sh tensorflow_scripts/single.py
    sbatch jobscript_tensorflow.sh tensorflow_scripts/mirrored_strategy.py

Without a GPU, the run script adds the options in small.txt: a small model.
"""

import argparse

import tensorflow as tf
from keras_model import make_model
from keras_report import Report, get_devices

from common.errors import run
from dataset import random_sequences


def main():
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--epochs", type=int, default=4, help="epochs")
    parser.add_argument("--sequences", type=int, default=1024, help="data set size")
    parser.add_argument("--batch-size", type=int, default=16, help="batch per GPU")
    parser.add_argument("--lr", type=float, default=0.0003, help="learning rate")
    parser.add_argument("--layers", type=int, default=12, help="transformer layers")
    parser.add_argument("--width", type=int, default=768, help="embedding dimension")
    parser.add_argument("--heads", type=int, default=12, help="attention heads")
    parser.add_argument("--length", type=int, default=256, help="sequence length")
    parser.add_argument("--verbose", action="store_true", help="print input shapes")
    parser.add_argument("--seed", type=int, default=0, help="random seed")
    args = parser.parse_args()

    devices = get_devices(cores=2)  # MIRRORED: all GPUs, or else 2 CPU cores
    strategy = tf.distribute.MirroredStrategy(devices)  # MIRRORED: a replica on each
    tf.keras.utils.set_random_seed(args.seed)
    with strategy.scope():  # MIRRORED: copies new variables to all GPUs
        model = make_model(args)  # MIRRORED: built and compiled in the scope
    replicas = strategy.num_replicas_in_sync  # MIRRORED: the number of GPUs

    dataset = random_sequences(args.sequences, args.length)
    dataset = dataset.shuffle(args.sequences, seed=args.seed)
    batch_size = args.batch_size * replicas  # MIRRORED: fit() splits each batch
    dataset = dataset.batch(batch_size, drop_remainder=True)
    report = Report(args, dataset, len(devices))
    model.fit(
        dataset, epochs=args.epochs, shuffle=False, verbose=0, callbacks=[report]
    )


if __name__ == "__main__":
    run(main)
