"""The transformer in TensorFlow, in two scripts that differ in a few rows.

    sbatch --gpus-per-node=1 jobscript_tensorflow.sh tensorflow/single.py
    sbatch jobscript_tensorflow.sh tensorflow/mirrored_strategy.py

Without a GPU add $SMALL, which `source common/env.sh` sets: a small model.
"""

import tensorflow as tf

from common.cli import OptionParser, at_least
from dataset import random_sequences
from model import make_model
from report import Report, get_devices


def main():
    parser = OptionParser(__doc__)
    add = parser.add_argument
    add("--epochs", type=at_least(1), default=4, help="passes over the data")
    add("--sequences", type=at_least(1), default=1024, help="in the data set")
    add("--batch-size", type=at_least(1), default=16, help="sequences per GPU")
    add("--lr", type=at_least(0.0), default=0.0003, help="learning rate")
    add("--layers", type=at_least(1), default=12, help="of the transformer")
    add("--width", type=at_least(1), default=768, help="numbers for each token")
    add("--heads", type=at_least(1), default=12, help="of attention")
    add("--length", type=at_least(1), default=256, help="of a sequence, in tokens")
    add("--verbose", action="store_true", help="each replica says what it gets")
    add("--seed", type=int, default=0, help="of the weights and the order")
    args = parser.parse_args()

    devices = get_devices(cores=1)[:1]
    tf.keras.utils.set_random_seed(args.seed)
    model = make_model(args)

    dataset = random_sequences(args.sequences, args.length)
    dataset = dataset.shuffle(args.sequences, seed=args.seed)
    batch_size = args.batch_size
    dataset = dataset.batch(batch_size, drop_remainder=True)
    report = Report(args, dataset, len(devices))
    model.fit(
        dataset, epochs=args.epochs, shuffle=False, verbose=0, callbacks=[report]
    )


if __name__ == "__main__":
    main()
