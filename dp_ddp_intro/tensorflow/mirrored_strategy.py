"""The transformer in TensorFlow, in two scripts that differ in a few rows.

    sbatch --gpus-per-node=1 jobscript_tensorflow.sh tensorflow/single.py
    sbatch jobscript_tensorflow.sh tensorflow/mirrored_strategy.py

Without Slurm type bash in place of sbatch. Without a GPU add
--layers 2 --width 128 --heads 4 --length 64 --lr 0.003: a small model.
"""

import tensorflow as tf

from common.cli import OptionParser, at_least
from dataset import random_sequences
from model import make_model
from report import Report, get_devices


def main():
    parser = OptionParser(__doc__)
    parser.add_argument("--epochs", type=at_least(1), default=4)
    parser.add_argument("--sequences", type=at_least(1), default=1024)
    parser.add_argument("--batch-size", type=at_least(1), default=16, help="per GPU")
    parser.add_argument("--lr", type=float, default=0.0003)
    parser.add_argument("--layers", type=at_least(1), default=12)
    parser.add_argument("--width", type=at_least(1), default=768)
    parser.add_argument("--heads", type=at_least(1), default=12)
    parser.add_argument("--length", type=at_least(1), default=256, help="in tokens")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    strategy = tf.distribute.MirroredStrategy(get_devices(2))  # MIRRORED: on all
    tf.keras.utils.set_random_seed(args.seed)
    with strategy.scope():  # MIRRORED: its variables are kept equal on all GPUs
        model = make_model(args)  # MIRRORED: made and compiled in the scope

    dataset = random_sequences(args.sequences, args.length)
    dataset = dataset.shuffle(args.sequences, seed=args.seed)
    batch_size = args.batch_size * strategy.num_replicas_in_sync  # MIRRORED: in all
    dataset = dataset.batch(batch_size, drop_remainder=True)
    report = Report(args, dataset, strategy.num_replicas_in_sync)
    model.fit(
        dataset, epochs=args.epochs, shuffle=False, verbose=0, callbacks=[report]
    )


if __name__ == "__main__":
    main()
