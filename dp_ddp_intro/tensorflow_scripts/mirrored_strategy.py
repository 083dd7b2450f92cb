"""Train a transformer in TensorFlow, on one GPU or with MirroredStrategy.

    sbatch --gpus-per-node=1 jobscript_tensorflow.sh tensorflow_scripts/single.py  # one GPU
    sbatch jobscript_tensorflow.sh tensorflow_scripts/mirrored_strategy.py  # two GPUs

Without a GPU, add $SMALL: `source common/env.sh` sets it to a small model.
"""

import tensorflow as tf

from common.cli import OptionParser, at_least
from dataset import random_sequences
from model import make_model
from report import Report, get_devices


def main():
    parser = OptionParser(__doc__)
    add = parser.add_argument
    add("--epochs", type=at_least(1), default=4, help="epochs")
    add("--sequences", type=at_least(1), default=1024, help="sequences to train on")
    add("--batch-size", type=at_least(1), default=16, help="sequences per GPU")
    add("--lr", type=at_least(0.0), default=0.0003, help="learning rate")
    add("--layers", type=at_least(1), default=12, help="transformer layers")
    add("--width", type=at_least(1), default=768, help="embedding dimension")
    add("--heads", type=at_least(1), default=12, help="attention heads")
    add("--length", type=at_least(1), default=256, help="tokens per sequence")
    add("--verbose", action="store_true", help="print the shape of each input")
    add("--seed", type=int, default=0, help="random seed")
    args = parser.parse_args()

    devices = get_devices(cores=2)  # MIRRORED: all GPUs, or else 2 CPU cores
    strategy = tf.distribute.MirroredStrategy(devices)  # MIRRORED: a replica on each
    tf.keras.utils.set_random_seed(args.seed)
    with strategy.scope():  # MIRRORED: mirrors its variables on all GPUs
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
    main()
