"""MultiWorkerMirroredStrategy: one TensorFlow process per node.

    sbatch jobscript_tensorflow_2nodes.sh tensorflow_scripts/multi_worker_mirrored.py

Without a GPU, the run script adds the options in small.txt: a small model.
"""

import argparse
import os
import sys
import time

import tensorflow as tf
from keras.utils import set_random_seed
from keras_model import make_model
from keras_report import Report

from common.errors import UserError, run
from dataset import random_sequences


def make_strategy():
    """Return the strategy and the cluster resolver, which lists the workers.

    The Slurm step lists the nodes; without Slurm, TF_CONFIG does. Raises UserError
    if both are missing. TensorFlow sorts node names as text and Slurm by number, so
    n9 and n10 do not find each other, but n09 and n10 do.
    """
    resolvers = tf.distribute.cluster_resolver
    if "SLURM_STEP_NODELIST" in os.environ:
        port = 10000 + int(os.environ["SLURM_JOB_ID"]) % 50000  # one per job
        gpus = max(1, len(tf.config.list_physical_devices("GPU")))
        resolver = resolvers.SlurmClusterResolver(
            port_base=port, gpus_per_node=gpus, auto_set_gpu=False
        )
    elif "TF_CONFIG" not in os.environ:
        raise UserError(
            f"{sys.argv[0]} needs several nodes; run "
            f"`sbatch jobscript_tensorflow_2nodes.sh {sys.argv[0]}`"
        )
    else:
        resolver = resolvers.TFConfigClusterResolver()
    strategy = tf.distribute.MultiWorkerMirroredStrategy(cluster_resolver=resolver)
    return strategy, resolver


def make_train_step(model, strategy):
    """Return a function that trains on a batch and returns its loss and accuracy.

    Keras 3's fit() fails with several workers (tested with 3.15), so the step is
    written here.
    """

    def replica_step(tokens, targets):
        with tf.GradientTape() as tape:
            logits = model(tokens, training=True)
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(targets, logits)
            loss = tf.reduce_mean(losses)
            # Divide, because the optimizer adds up the gradients of all replicas.
            scaled_loss = loss / strategy.num_replicas_in_sync
        gradients = tape.gradient(scaled_loss, model.trainable_variables)
        model.optimizer.apply(gradients, model.trainable_variables)
        correct = tf.argmax(logits, axis=-1) == targets
        return loss, tf.reduce_mean(tf.cast(correct, tf.float32))

    @tf.function
    def train_step(tokens, targets):
        results = strategy.run(replica_step, args=(tokens, targets))
        return [strategy.reduce("MEAN", result, axis=None) for result in results]

    return train_step


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

    strategy, resolver = make_strategy()  # before any other use of TensorFlow
    set_random_seed(args.seed)
    with strategy.scope():
        model = make_model(args)
        model.optimizer.build(model.trainable_variables)

    dataset = random_sequences(args.sequences, args.length)
    dataset = dataset.shuffle(args.sequences, seed=args.seed)
    batch_size = args.batch_size * strategy.num_replicas_in_sync
    dataset = dataset.batch(batch_size, drop_remainder=True)
    nodes = resolver.cluster_spec().num_tasks("worker")
    first = resolver.task_id == 0
    report = Report(args, dataset, strategy.num_replicas_in_sync, nodes, first)
    options = tf.data.Options()  # each worker takes its shard of each batch
    options.experimental_distribute.auto_shard_policy = (
        tf.data.experimental.AutoShardPolicy.DATA
    )
    batches = strategy.experimental_distribute_dataset(dataset.with_options(options))

    train_step = make_train_step(model, strategy)
    for epoch in range(args.epochs):
        report.on_epoch_begin(epoch)
        sums = 0
        for tokens, targets in batches:
            sums += tf.stack(train_step(tokens, targets))
        loss, accuracy = (sums / len(dataset)).numpy().tolist()
        report.on_epoch_end(epoch, {"loss": loss, "accuracy": accuracy})
    report.on_train_end()
    if first:
        time.sleep(2)  # the other workers print errors if this one exits first


if __name__ == "__main__":
    run(main)
